"""The paper's theory, tested."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..errors import SettingError
from ..files import write_text
from ..reproduce.theory import figure
from ..reproduce.theory.counterexample import MEDIAN, MEDIAN_ROUNDS, SIDES_ROUNDS, median, sides
from ..reproduce.theory.experiments import EXPERIMENTS
from ..reproduce.theory.measured import Line, OnSteps, run
from ..reproduce.theory.slopes import TOLERANCE, verdicts
from .display import console

Part = tuple[str, int, Callable[[OnSteps], Iterable[Line]]]
"""A title, how many local steps it takes, and what runs it."""


def theory(
    seeds: Annotated[int, typer.Option(min=2, help="Seeds 0, 1, 2 and so on.")] = 20,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Where the lines and the pictures go.")
    ] = Path("paper/theory"),
) -> None:
    """Measure what the paper's Theorem 1 and its corollary predict, and say where they fail.

    On a problem with exact gradients that meets their assumptions, it varies the clients n, the
    rounds R, the local steps T, the layers h and the lazy synchronisation Z, with the corollary's
    rate alpha = c / sqrt(h R). Then the case against: three quadratics, on which Fed-LAMB goes to
    the median of the clients, not to a stationary point of their mean loss.

    Writes theory.jsonl and two pictures, theory-slopes and theory-median, in about three minutes.

    Example: fedlamb theory --seeds 20 --out paper/theory
    """
    figure.require()
    if out.exists() and not out.is_dir():
        raise SettingError("--out", str(out), "is a file, and must be a folder")
    out.mkdir(parents=True, exist_ok=True)
    lines = list(_lines(_parts(seeds)))
    write_text(out / "theory.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    pictures = figure.draw(lines, out)
    _show_slopes(lines)
    _show_median(lines)
    _show_sides(lines)
    for path in (out / "theory.jsonl", *pictures):
        console.print(f"Written: {path}", soft_wrap=True)


def _parts(seeds: int) -> Iterator[Part]:
    for experiment in EXPERIMENTS:
        steps = sum(setting.R * setting.T for setting in experiment.points())
        yield experiment.title, steps, partial(run, experiment, seeds)
    yield "three quadratics", 2 * len(MEDIAN) * MEDIAN_ROUNDS, median
    yield "both sides of Theorem 1", sum(SIDES_ROUNDS), sides


def _lines(parts: Iterable[Part]) -> Iterator[Line]:
    for title, steps, lines in parts:
        with _shown(title, steps) as tell:
            yield from lines(tell)


@contextmanager
def _shown(title: str, steps: int) -> Iterator[OnSteps]:
    """A bar on a terminal; elsewhere a line at the start."""
    bars = Progress(
        TextColumn(f"{title:36}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    if not console.is_terminal:
        console.print(f"{title} …")
    with bars:
        bar = bars.add_task("", total=steps)
        yield lambda done: bars.advance(bar, done)


def _show_slopes(lines: Sequence[Line]) -> None:
    table = Table(title="Exponents: value ~ letter ^ exponent", title_justify="left")
    for heading in ("letter varied", "measure"):
        table.add_column(heading)
    for heading in ("at most", "measured", "last step"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    found = verdicts(lines)
    for one in found:
        table.add_row(
            one.experiment.title if one.measure == "plain" else "",
            one.measure,
            f"{one.predicted:+.1f}",
            str(one.slope),
            str(one.last),
            "as predicted" if one.holds else "not as predicted",
            end_section=one.measure == "weighted",
        )
    console.print(table)
    console.print(
        "plain: |grad f|^2, the corollary's left side. weighted: |grad f / v_hat^(1/4)|^2, Theorem "
        "1's. at most: the exponent of the slowest term on the right side. measured: over all "
        "values; last step: between the two largest; means over seeds and their 95 % confidence "
        "intervals. As predicted: both intervals end below the prediction plus "
        f"{TOLERANCE}; to fall faster than an upper bound is no fault. Exponents are compared, "
        "not constants."
    )

    reasons = {one.experiment.title: one.experiment.why for one in found if not one.holds}
    for title, why in reasons.items():
        if why:
            console.print(f"{title}: {why}")


def _show_median(lines: Sequence[Line]) -> None:
    table = Table(
        title="Three clients, losses (x - c)^2 / 2, full gradients, T = 1", title_justify="left"
    )
    for heading in ("centres", "mean", "median", "method", "x at the end", "gradient there"):
        table.add_column(heading, justify="right")
    for line in lines:
        if line["experiment"] in MEDIAN:
            centres = line["settings"]["centres"]
            table.add_row(
                ", ".join(f"{c:g}" for c in centres),
                f"{mean(centres):g}",
                f"{sorted(centres)[1]:g}",
                line["settings"]["method"],
                f"{line['x'][-1]:z.3f}",
                f"{line['gradient']:z.3f}",
            )
    console.print(table)


def _show_sides(lines: Sequence[Line]) -> None:
    table = Table(title="Both sides of Theorem 1, centres 10, 10, 13", title_justify="left")
    for heading in ("R", "alpha", "left, measured", "right", "verdict"):
        table.add_column(heading, justify="right")
    for line in lines:
        if line["experiment"] == "theorem-1":
            holds = line["weighted"] <= line["right"]
            table.add_row(
                f"{line['settings']['rounds']:,}",
                f"{line['settings']['alpha']:.5f}",
                f"{line['weighted']:.3f}",
                f"{line['right']:.3f}",
                "as predicted" if holds else "not as predicted",
            )
    console.print(table)
