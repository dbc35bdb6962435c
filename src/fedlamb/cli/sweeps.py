"""Sweeps: a grid of hyper-parameters and seeds, all trials of a method as one program."""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ..algorithms import ALGORITHMS
from ..errors import SettingError, unknown_name
from ..files import append_lines, make_new, whole_lines
from ..records import environment, locked, summary_of, write_json
from ..report import page
from ..report.sweep_page import headings, ranked, write_sweep_page
from ..reproduce.panels import PAPER
from ..reproduce.running import short_name
from ..reproduce.trials import Bench
from ..settings import Experiment, build_algorithm, load_experiment, plain_value, validate
from ..simulate.sweep import Together
from .display import console, decoding, progress, stop_at_once
from .options import Changes, DataRoot, Device, Out, Preset, of_method, with_options
from .runs import LOST, new_name


def sweep(
    method: Annotated[
        str, typer.Option("--method", "-m", help=f"One of {', '.join(ALGORITHMS)}.")
    ] = "fed-lamb",
    preset: Preset = "digits",
    grid: Annotated[
        list[str] | None,
        typer.Option(
            "--grid",
            "-g",
            metavar="KEY=A,B,C",
            help="Values of one hyper-parameter; may be repeated. By default the paper's rates, "
            "without weight decay.",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="So many, from the settings' seed on.")] = 1,
    changes: Changes = None,
    data_root: DataRoot = None,
    device: Device = None,
    out: Out = None,
) -> None:
    """Run a grid of hyper-parameters and seeds as one program on one device.

    Results are those of separate runs. Prints the best points, by the mean over seeds of the best
    test accuracy, and writes a folder with trials.jsonl, a line per trial, and report.html, with
    accuracy along the grid and the best curves. A sweep that was stopped goes on by `fedlamb
    resume`; one that was killed, from the round that was saved last (a twentieth of the time goes
    into saving).

    Example: fedlamb sweep -m fed-lamb -g lr=0.01,0.03,0.1 -g weight_decay=0,0.01 --seeds 3
    """
    if method not in ALGORITHMS:
        raise unknown_name("method", method, ALGORITHMS)
    table = _table(method, grid or ())
    settings = with_options(of_method(method, changes or ()), data_root, device, None)
    first = load_experiment(preset, settings)
    experiments = [first.model_copy(update={"seed": first.seed + i}) for i in range(seeds)]
    if method not in experiments[0].algorithms:
        experiments = [e.with_method(method, _first(table)) for e in experiments]
    facts = {
        "method": method,
        "grid": table,
        "seeds": seeds,
        "settings": experiments[0].only(method).complete(),
    }
    name = new_name(preset, f"sweep-{method}")
    _carry_out(out or name, facts, experiments, lambda: _begin(out, name, facts))


def resume_sweep(folder: Path, data_root: Path | None, device: str | None) -> None:
    """Goes on with a sweep that was stopped."""
    facts = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))
    settings = facts["settings"]
    settings["data"] |= {"root": str(data_root.absolute())} if data_root else {}
    settings["engine"] |= {"device": device} if device else {}
    seeds = range(settings["seed"], settings["seed"] + facts["seeds"])
    experiments = [validate({**settings, "seed": seed}) for seed in seeds]
    _carry_out(folder, facts, experiments, lambda: folder)


def _carry_out(
    folder: Path,
    facts: dict[str, Any],
    experiments: list[Experiment],
    begin: Callable[[], Path],
) -> None:
    """Runs what is left of a sweep, then shows the results; `begin` makes its folder."""
    method, table = facts["method"], facts["grid"]
    points = [
        (dict(zip(table, values, strict=True)), experiment)
        for values in product(*table.values())
        for experiment in experiments
    ]
    for values, experiment in points:  # everything that can be wrong is wrong at once
        build_algorithm(method, {**experiment.algorithms[method], **values})
    bench = Bench(Together(experiments[0].engine.compile))
    if not (folder / "sweep.json").is_file():  # what is missing is told before a folder is made
        with decoding(experiments[0].data.name) as told:
            bench.points(method, points[:1], told)
    folder = begin()
    with locked(folder), stop_at_once():
        log = folder / "trials.jsonl"
        done = _finished(log)
        left = [p for p in points if _key(p[0], p[1].seed) not in done]
        if left:
            partial = [folder / "partial" / short_name(_key(v, e.seed)) for v, e in left]
            for line in _told_when_stopped(_run(method, bench, left, partial), folder):
                append_lines(log, line)
        shutil.rmtree(folder / "partial", ignore_errors=True)
        show_sweep(folder)
    console.print(f"Sweep folder: {folder}", soft_wrap=True)


def _told_when_stopped(lines: Iterator[dict[str, Any]], folder: Path) -> Iterator[dict[str, Any]]:
    try:
        yield from lines
    except KeyboardInterrupt:
        console.print(
            f"Stopped; what is done is kept. Go on with: fedlamb resume {folder}",
            soft_wrap=True,
        )
        raise typer.Exit(code=130) from None


def _table(method: str, grid: Sequence[str]) -> dict[str, list[Any]]:
    """Field of the method -> its values."""
    known = [field.name for field in fields(ALGORITHMS[method])]
    table: dict[str, list[Any]] = {}
    for key, values in (_axis(text) for text in grid):
        if key in table:
            raise SettingError("--grid", key, "must be given once, with all of its values")
        if key not in known:
            raise unknown_name("--grid", key, known)
        table[key] = values
    return table or PAPER[method]


def _axis(text: str) -> tuple[str, list[Any]]:
    key, equals, values = text.partition("=")
    if not equals or not key or not values:
        raise SettingError("--grid", text, "must be KEY=A,B,C, for example lr=0.01,0.03")
    found: list[Any] = []
    for value in (_value(part.strip()) for part in values.split(",")):
        if value in found:
            raise SettingError("--grid", text, f"must name each value once, and has {value} twice")
        found.append(value)
    return key.strip(), found


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return plain_value(text)


def _first(table: dict[str, list[Any]]) -> dict[str, Any]:
    return {key: values[0] for key, values in table.items()}


def _begin(out: Path | None, otherwise: Path, facts: dict[str, Any]) -> Path:
    """A new sweep's folder, or that of the same one, which goes on."""
    folder = out or make_new(otherwise)
    known = folder / "sweep.json"
    if known.is_file():
        if json.loads(known.read_text(encoding="utf-8")) != json.loads(json.dumps(facts)):
            raise SettingError(
                "out", str(folder), "holds a sweep with other settings; name a new folder"
            )
        return folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SettingError(
            "out", str(folder), "exists already and is not overwritten; name a new folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "environment.json", environment())
    write_json(known, facts)
    return folder


def _key(values: dict[str, Any], seed: int) -> str:
    return json.dumps([values, seed])


def _finished(log: Path) -> dict[str, dict[str, Any]]:
    """The lines of all finished trials."""
    return {_key(line["values"], line["seed"]): line for line in whole_lines(log)}


def _run(
    method: str,
    bench: Bench,
    points: list[tuple[dict[str, Any], Experiment]],
    partial: list[Path],
) -> Iterator[dict[str, Any]]:
    """A line for each trial, once all are done."""
    with decoding(points[0][1].data.name) as told:
        trials = bench.points(method, points, told)
    rounds = trials[0].run.rounds
    console.print(
        f"{len(trials)} trials of {method}, {rounds} rounds, on {trials[0].run.task.device}"
    )
    begun = time.perf_counter()
    with progress() as shown:
        shown.begin(method, rounds, 0)
        going_on: bool | None = None

        def on_round(number: int, total: int, best: float | None) -> None:
            nonlocal going_on
            if going_on is None and number > 1:
                console.print(f"going on after round {number - 1}")
            going_on = number > 1
            shown.rounds(number, best)

        found = bench.run_together(trials, partial, on_round)
    seconds = time.perf_counter() - begun
    for point, table in zip(trials, found, strict=True):
        status = "diverged" if point.run.diverged else "finished"
        summary = summary_of(method, status, points[0][1].target, table)  # type: ignore[arg-type]
        yield {
            "values": point.values,
            "seed": point.seed,
            **asdict(summary),
            "test_accuracy": [line["test_accuracy"] for line in table],
            "seconds_of_all": seconds,
        }


def show_sweep(folder: Path) -> None:
    """Prints the best points of a sweep and draws its page, from its folder alone."""
    facts = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))
    trials = list(_finished(folder / "trials.jsonl").values())
    if not trials:
        right = f"holds no finished trial yet; fedlamb resume {folder} goes on with it"
        raise SettingError("sweep folder", str(folder), right)
    points = ranked(trials)
    shown = f"the best {_SHOWN} of {len(points)}" if len(points) > _SHOWN else f"{len(points)}"
    table = Table(title=f"{facts['method']}: {shown} points", title_justify="left")
    for heading in headings(facts["grid"]):
        table.add_column(heading, justify="right")
    for point in points[:_SHOWN]:
        table.add_row(*point.cells())
    console.print(table)
    if points[0].lost > LOST:
        lost = f"The first of them ends {100 * points[0].lost:.0f} points below its best"
        console.print(f"{lost}; a lower rate or a schedule may keep it", soft_wrap=True)
    if page.available():
        write_sweep_page(folder / "report.html", facts, trials)
        console.print(f"Report: {folder / 'report.html'}", soft_wrap=True)


_SHOWN = 10
