"""Draws every figure and writes every table from the logs in `results/`, and nothing else.

    python paper/draw.py [--results FOLDER --out FOLDER]         (pip install 'fedlamb[paper]')

Writes figures/*.png and *.svg, front.* with the first three panels among them, tables.md, and from
the project's own results the tuned rates that come with the package. A curve is the mean over seeds
of the test accuracy at the point that tuning chose; the band is from the lowest to the highest
seed; the axis begins 25 points below the best curve. Where curves differ in eps, best accuracies
over eps. A panel that has not been run says so.
"""

import argparse
import json
import os
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from textwrap import fill
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

from fedlamb.report.table import spread
from fedlamb.reproduce.panels import FIGURES, Curve, Panel, panels_of
from fedlamb.reproduce.results import (
    Line,
    Results,
    accuracies,
    choose,
    final_lines,
    first_round_at,
    of_curve,
)
from fedlamb.reproduce.study import Select, Wanted, next_groups, tuned_table

HERE = Path(__file__).resolve().parent
TUNED = HERE.parent / "src" / "fedlamb" / "reproduce" / "tuned.json"
COLOURS = {
    "fed-lamb": "#d62728",
    "mime-lamb": "#1f77b4",
    "fed-ams": "#ff9896",
    "mime": "#8ab8e6",
    "fed-sgd": "#7f7f7f",
    "adp-fed": "#2ca02c",
}
DASHES = ["-", "--", ":", "-.", (0, (1, 3))]
NOTES = {
    "cifar10": "images re-encoded as JPEG by their source",
    "tiny_imagenet": "half of the training set",
}
"""Of the data with which the logs were made."""
TARGETS = (0.9, 0.95)
SHOWN = 25  # points below the best
SEEDS = 3


def chosen_lines(results: Results, panel: Panel, curve: Curve, select: str) -> list[Line]:
    """The whole runs, one for each seed, at the point that was chosen."""
    trials = results.trials(panel)
    rounds, lines = rounds_of(list(trials.values())), of_curve(trials, curve, select)
    choice = choose(lines, rounds, select)
    return final_lines(lines, choice.values, rounds, SEEDS) if choice else []


def rounds_of(lines: Sequence[Line]) -> int:
    """Of the longest runs of a panel: the paper's number, unless fewer were asked for."""
    return max((line["rounds"] for line in lines), default=0)


def draw_figure(figure: str, panels: Sequence[Panel], results: Results, folder: Path) -> bool:
    """The panels in the paper's arrangement; False where none has been run."""
    if not any(results.trials(panel) for panel in panels):
        return False
    columns = 3 if len(panels) > 2 else len(panels)
    rows = -(-len(panels) // columns)
    size = (4.0 * columns, 3.2 * rows)
    whole, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axis, panel in zip(axes.flat, panels, strict=False):
        draw_panel(axis, panel, results)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    for suffix in ("png", "svg"):
        facts = {"Date": None} if suffix == "svg" else {}
        whole.savefig(folder / f"{figure}.{suffix}", dpi=110, metadata=facts)
    plt.close(whole)
    return True


def draw_panel(axis: Any, panel: Panel, results: Results) -> None:
    """One panel: its curves, or where eps is what they differ in, what each comes to over eps."""
    title = heading(panel, results).replace(" (", "\n(").split("\n")
    axis.set_title("\n".join(map(partial(fill, width=52), title)), fontsize=9)
    axis.set_ylabel("test accuracy, %", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.3)
    drawn = [(c, chosen_lines(results, panel, c, "test")) for c in panel.curves]
    drawn = [(curve, lines) for curve, lines in drawn if lines]
    over_eps = "eps" in panel.curves[0].fixed
    axis.set_xlabel("eps" if over_eps else "communication round", fontsize=8)
    if not drawn:
        said = f"not run yet:\nfedlamb reproduce {panel.figure} \\\n--panel {panel.name}"
        axis.text(0.5, 0.5, said, ha="center", va="center", fontsize=8, transform=axis.transAxes)
        axis.set_xticks([])
        axis.set_yticks([])
        return
    (_draw_over_eps if over_eps else _draw_over_rounds)(axis, drawn)
    axis.legend(fontsize=6.5, loc="lower right")
    run = _methods(curve for curve, _ in drawn)
    if missing := [method for method in _methods(panel.curves) if method not in run]:
        said = f"not run: {', '.join(missing)}"
        axis.text(0.02, 0.97, said, va="top", fontsize=6.5, transform=axis.transAxes)


def _draw_over_rounds(axis: Any, drawn: Sequence[tuple[Curve, list[Line]]]) -> None:
    of_method: dict[str, int] = {}
    of_rounds = [list(zip(*map(accuracies, lines), strict=False)) for _, lines in drawn]
    best = [100 * max(map(mean, rounds)) for rounds in of_rounds]
    highest = max(best)
    for (curve, lines), rounds, own in zip(drawn, of_rounds, best, strict=True):
        number = of_method[curve.method] = of_method.get(curve.method, -1) + 1
        low = highest - SHOWN
        ends = "ends below the axis" if 100 * mean(rounds[-1]) < low else ""
        below = "below the axis" if own < low else ends
        label = f"{curve.label} (n = {len(lines)}{', ' if below else ''}{below})"
        dashes = DASHES[number % len(DASHES)]
        _line(axis, range(1, len(rounds) + 1), rounds, curve.method, label, linestyle=dashes)
    axis.set_ylim(max(0.0, highest - SHOWN), min(100.0, highest + 1))
    axis.xaxis.get_major_locator().set_params(integer=True)


def _draw_over_eps(axis: Any, drawn: Sequence[tuple[Curve, list[Line]]]) -> None:
    """The best accuracy of each run."""
    axis.set_xscale("log")
    for method in dict.fromkeys(curve.method for curve, _ in drawn):
        found = {c.fixed["eps"]: lines for c, lines in drawn if c.method == method}
        best = [[max(accuracies(line)) for line in lines] for lines in found.values()]
        label = f"{method} (n = {min(map(len, best))})"
        _line(axis, list(found), best, method, label, marker="o")


def _line(
    axis: Any, places: Any, of_seeds: Sequence[Any], method: str, label: str, **style: Any
) -> None:
    """The mean over seeds, and a band from the lowest to the highest."""
    low, middle, high = ([100 * f(now) for now in of_seeds] for f in (min, mean, max))
    style |= {"color": COLOURS[method], "markersize": 3}
    axis.plot(places, middle, linewidth=1.3, label=label, **style)
    axis.fill_between(places, low, high, color=COLOURS[method], alpha=0.15, linewidth=0)


def tables(results: Results, out: Path) -> Iterable[str]:
    """Markdown for every panel that has been run, to lie in the folder `out`."""
    there = Path(os.path.relpath(results.folder, out)).as_posix()
    yield f"# Results\n\nMade by `python paper/draw.py` from `{there}/`: best and final test"
    yield "accuracy, mean ± sample standard deviation over seeds, at the chosen point; the first"
    yield "round in which the mean reaches a target; trials of all stages that tuning took."
    for figure in FIGURES:
        for panel in panels_of(figure):
            selects: tuple[Select, ...] = ("test", "validation")
            for select in selects:
                rows = list(_rows(results, panel, select))
                if rows:
                    where = f"[log]({there}/{results.path(panel).name})"
                    yield f"\n## {panel.id}: {heading(panel, results)}\n"
                    yield f"{_choice(results, panel, select)}. {where},"
                    yield f"`{command(panel, results, select)}`.\n"
                    heads = [f"rounds to {100 * t:.0f} %" for t in TARGETS]
                    names = ["method", "chosen", "best", "final", *heads, "seeds", "tuning runs"]
                    yield _row(names)
                    yield _row(["---"] * len(names))
                    yield from rows
                    if left_out := _left_out(results, panel, select):
                        yield f"\nNot shown, since it has run for fewer rounds: {left_out}."


def heading(panel: Panel, results: Results) -> str:
    """The panel's title, and what must be known beside it."""
    notes = [NOTES.get(panel.settings["data"]["name"], "")]
    rounds = rounds_of(list(results.trials(panel).values()))
    if rounds and panel.rates_from and not _searched(results, panel, "test"):
        notes.append(f"rates of {panel.rates_from.split('/')[1]}")
    if 0 < rounds < panel.rounds:
        notes.append(f"only {rounds} of {panel.rounds} rounds yet")
    notes = [note for note in notes if note]
    return f"{panel.title} ({', '.join(notes)})" if notes else panel.title


def command(panel: Panel, results: Results, select: Select) -> str:
    """What runs a panel as it was run."""
    trials = results.trials(panel)
    rounds = rounds_of(list(trials.values()))
    tune = _searched(results, panel, select)
    seeds = max(len(chosen_lines(results, panel, curve, select)) for curve in panel.curves)
    run = _methods(c for c in panel.curves if chosen_lines(results, panel, c, select))
    more = [
        f"-m {','.join(run)}" if run != _methods(panel.curves) else "",
        "--tune" if tune else "",
        "--select validation" if select == "validation" else "",
        f"--seeds {seeds}" if seeds < SEEDS and not tune else "",
        f"--rounds {rounds}" if rounds < panel.rounds else "",
    ]
    return " ".join(["fedlamb reproduce", panel.figure, "--panel", panel.name, *filter(None, more)])


def _methods(curves: Iterable[Curve]) -> list[str]:
    return list(dict.fromkeys(curve.method for curve in curves))


def _choice(results: Results, panel: Panel, select: Select) -> str:
    """Where the rates come from."""
    if _searched(results, panel, select):
        return f"Chosen by {'best test accuracy' if select == 'test' else 'validation'}"
    lender = panel.tuned_as or panel.rates_from
    return f"Not tuned: rates of {lender}" if lender else "Not tuned: rates as the package has them"


def _searched(results: Results, panel: Panel, select: Select) -> bool:
    """Whether any of a panel's rates were searched for."""
    trials = results.trials(panel)
    return any(_tuned(of_curve(trials, curve, select)) for curve in panel.curves)


def _tuned(lines: Sequence[Line]) -> bool:
    """Whether several points were tried, or else one was given."""
    return len({json.dumps(line["values"], sort_keys=True) for line in lines}) > 1


def _left_out(results: Results, panel: Panel, select: Select) -> str:
    """The curves that have trials, and none as long as the panel's longest."""
    trials = results.trials(panel)
    begun = [curve for curve in panel.curves if of_curve(trials, curve, select)]
    short = [curve for curve in begun if not chosen_lines(results, panel, curve, select)]
    return ", ".join(curve.label for curve in short)


def _rows(results: Results, panel: Panel, select: Select) -> Iterable[str]:
    trials = results.trials(panel)
    for curve in panel.curves:
        lines = chosen_lines(results, panel, curve, select)
        if not lines:
            continue
        values = lines[0]["values"]
        rates = ", ".join(f"{k} = {v}" for k, v in values.items() if k not in curve.fixed)
        own = of_curve(trials, curve, select)
        tuned = _tuned(own)
        edges = _edges(curve.grid(panel.narrow), values) if tuned else []
        edge = f" (edge of the grid: {', '.join(edges)})" if edges else ""
        yield _row(
            [
                curve.label,
                f"{rates}{edge}{_left(results, panel, curve, select) if tuned else ''}",
                spread([max(accuracies(x)) for x in lines]),
                spread([accuracies(x)[-1] for x in lines]),
                *(str(first_round_at(lines, target) or "–") for target in TARGETS),
                str(len(lines)),
                str(len(own)) if tuned else "–",
            ]
        )


def _left(results: Results, panel: Panel, curve: Curve, select: Select) -> str:
    """What of the tuning has not been run yet."""
    if panel.tuned_as:
        return ""
    wanted = Wanted(panel, (curve,), panel.rounds, SEEDS, select, tune=True)
    count = sum(len(group.points) for group in next_groups(wanted, results))
    return f" (**not final**: {count} or more tuning runs left)" if count else ""


def _edges(grid: dict[str, list[Any]], values: dict[str, Any]) -> list[str]:
    """The rates that lie at an end of their grid; 0 is no edge for weight decay."""
    rates = [key for key in ("lr", "server_lr") if key in grid]
    return [key for key in rates if values[key] in (min(grid[key]), max(grid[key]))]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Everything, in some seconds."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--results", type=Path, default=HERE / "results")
    arguments.add_argument("--out", type=Path, default=HERE)
    given = arguments.parse_args()
    if not list(given.results.glob("*.jsonl")):
        arguments.error(f"{given.results} holds no results (*.jsonl)")
    if given.out.exists() and not given.out.is_dir():
        arguments.error(f"--out {given.out} is a file, and must be a folder")
    mpl.rcParams.update({"svg.hashsalt": "fedlamb", "svg.fonttype": "none"})
    results, folder = Results(given.results), given.out / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    figures = {figure: panels_of(figure) for figure in FIGURES}
    run = [panel for panel in panels_of("all") if results.trials(panel)]
    figures["front"] = run[:3]  # for the project's front page
    drawn = [name for name, panels in figures.items() if draw_figure(name, panels, results, folder)]
    (given.out / "tables.md").write_text(
        "\n".join(tables(results, given.out)) + "\n", encoding="utf-8"
    )
    if given.out == HERE:
        TUNED.write_text(json.dumps(tuned_table(results, SEEDS), indent=1) + "\n", encoding="utf-8")
    print(f"drawn: {', '.join(drawn)}; tables.md")


if __name__ == "__main__":
    main()
