"""Runs: compare and run, and how a stopped one goes on."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ..algorithms import ALGORITHMS
from ..errors import SettingError, unknown_name
from ..experiment import build_run, device_of, load_data
from ..files import make_new
from ..records import (
    RunFolder,
    Status,
    Summary,
    conduct,
    locked,
    read_metrics,
    summary_of,
    too_few,
    write_json,
)
from ..report import page
from ..report.table import headings, rows
from ..settings import Experiment, load_experiment, validate
from ..simulate.crew import Crew, CrewError
from ..simulate.fit import Run
from ..simulate.saying import leads
from ..tasks.datasets import Dataset
from .display import console, decoding, progress, stop_after_round
from .options import Changes, DataRoot, Device, Out, Preset, Workers, of_method, with_options
from .workers import best_number, crew_of


def compare(
    preset: Preset = "digits",
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--methods", "-m", help="Comma-separated or repeated; by default all in the preset."
        ),
    ] = None,
    changes: Changes = None,
    data_root: DataRoot = None,
    device: Device = None,
    workers: Workers = None,
    out: Out = None,
) -> None:
    """Run several methods side by side: same data, start, cohorts and batches.

    Prints a table and writes a run folder with report.html.

    Ctrl-C ends after the round with everything saved; fedlamb resume goes on to the same bits.

    Example: fedlamb compare -m fed-lamb,fed-ams -s algorithms.fed-ams.lr=0.003
    """
    experiment = load_experiment(preset, with_options(changes or (), data_root, device, workers))
    chosen = [name.strip() for part in methods or () for name in part.split(",") if name.strip()]
    if methods and not chosen:
        raise SettingError("methods", ",".join(methods), "names no method; leave -m out for all")
    if chosen:
        experiment = _select(experiment, chosen)
    _start(experiment, out, new_name(preset, "compare"))


def run(
    method: Annotated[
        str,
        typer.Option(
            "--method",
            "-m",
            help=f"One of {', '.join(ALGORITHMS)}; by default fed-lamb, or the only one there is.",
        ),
    ] = "",
    preset: Preset = "digits",
    changes: Changes = None,
    data_root: DataRoot = None,
    device: Device = None,
    workers: Workers = None,
    out: Out = None,
) -> None:
    """Run one method. Its hyper-parameters may be set as algorithm.KEY.

    Example: fedlamb run -m fed-lamb -s algorithm.lr=0.01 -s federation.rounds=20
    """
    if not method:
        there = list(load_experiment(preset).algorithms)
        method = there[0] if len(there) == 1 else "fed-lamb"
    if "," in method:
        right = f"is one method of run; fedlamb compare -m {method} runs several side by side"
        raise SettingError("method", method, right)
    if method not in ALGORITHMS:
        raise unknown_name("method", method, ALGORITHMS)
    changed = with_options(of_method(method, changes or ()), data_root, device, workers)
    experiment = load_experiment(preset, changed).only(method)
    _start(experiment, out, new_name(preset, method))


def resume_run(
    folder: Path, data_root: Path | None, device: str | None, workers: str | None
) -> None:
    """Goes on with a run or a comparison."""
    experiment = experiment_of(folder, with_options((), data_root, device, workers))
    data = _data(experiment)
    count = experiment.engine.workers
    if count == "auto":
        raise SettingError("workers", count, "must be a number for a run that goes on")
    # The lock comes last: no other process may hold it when this one is gone.
    with crew_of(count, experiment.engine), ExitStack() as held:
        if leads():
            held.enter_context(locked(folder))
        _carry_out(experiment, folder, data)


def _data(experiment: Experiment) -> Dataset:
    with decoding(experiment.data.name) as told:
        return load_data(experiment, told)


def _select(experiment: Experiment, methods: list[str]) -> Experiment:
    for method in methods:
        if method not in experiment.algorithms:
            raise unknown_name("methods", method, experiment.algorithms)
    chosen = {method: experiment.algorithms[method] for method in methods}
    return experiment.model_copy(update={"algorithms": chosen})


def new_name(preset: str, kind: str) -> Path:
    """For a folder under runs/; `make_new` sees to it that no two runs have it."""
    stamp = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{Path(preset).stem}-{kind}-{stamp}"


def _start(experiment: Experiment, out: Path | None, otherwise: Path) -> None:
    folder = out or otherwise
    if not leads():
        return _follow(experiment, _data(experiment))
    leftovers = {".lock"}  # of a start that was refused
    if out and out.exists() and (not out.is_dir() or {p.name for p in out.iterdir()} - leftovers):
        raise SettingError(
            "out", str(out), "exists already and is not overwritten; name a new folder"
        )
    # Everything that can be wrong with the settings is wrong before anything is written.
    data = _data(experiment)
    built = [build_run(experiment, method, data) for method in experiment.algorithms]
    workers = experiment.engine.workers
    if workers == "auto":
        workers, why = best_number(built[0], len(built))
        console.print(f"Workers: {workers} ({why})")
        engine = experiment.engine.model_copy(update={"workers": workers})
        experiment = experiment.model_copy(update={"engine": engine})
    cohort = len(built[0].plan.cohort(1))
    if workers > cohort:
        right = f"must be at most {cohort}, the clients of a round; more would have nothing to do"
        raise SettingError("engine.workers", workers, right)
    settings = experiment.complete()
    if out is None:
        folder = make_new(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with crew_of(workers, experiment.engine):
        if not leads():
            return _follow(experiment, data)
        with locked(folder):
            if (folder / "settings.json").exists():  # another process was faster
                raise SettingError("out", str(folder), "exists already; name a new folder")
            write_json(folder / "settings.json", settings)
            Crew.join(device_of(experiment.engine)).told(str(folder.absolute()))
            _carry_out(validate(settings), folder, data)
    return None


def _follow(experiment: Experiment, data: Dataset) -> None:
    """What a process does that does not lead: the same run, in the folder that it is told."""
    folder = Path(Crew.join(device_of(experiment.engine)).told(""))
    _carry_out(experiment, folder, data)


def _carry_out(experiment: Experiment, folder: Path, data: Dataset) -> None:
    """Runs what is left of every method, then shows the results."""
    summaries: list[Summary] = []
    stopped = ""
    if leads() and not page.available():
        console.print("No report.html will be drawn: pip install 'fedlamb[report]' brings it.")
    with stop_after_round() as stop, progress() as shown:
        for method in experiment.algorithms:
            alone = experiment.only(method)
            place = RunFolder(_place(experiment, folder, method))
            if leads() and not place.journal.exists():
                place.create(alone.complete())
            federation = build_run(experiment, method, data)
            federation.on_client = shown.client
            if not summaries:
                _say_how(experiment, federation)
            shown.begin(method, federation.rounds, len(place.metrics()) if leads() else 0)
            try:
                status = conduct(federation, place, shown.round, stop)
                stopped = "Stopped after the round." if status == "interrupted" else ""
            except KeyboardInterrupt:
                status, stopped = "interrupted", "Stopped at once; the round under way is lost."
            except CrewError as error:
                said = f"{error}; {federation.number} rounds of {method} are saved, and fedlamb "
                raise CrewError(f"{said}resume {folder} goes on from there") from error
            if leads():
                summaries.append(place.summarise(method, status, experiment.target))
            if stopped:
                break
    if not leads():
        return
    show(experiment, folder, summaries)
    if stopped:
        console.print(stopped)
        raise typer.Exit(code=130)


def _say_how(experiment: Experiment, run: Run) -> None:
    """One line: where and how the clients run, and why."""
    workers = f", {run.crew.size} workers" if run.crew.size > 1 else ""
    console.print(f"On {run.task.device}{workers}, {run.executor} executor: {run.reason}")


def _place(experiment: Experiment, folder: Path, method: str) -> Path:
    """A single method lies in the folder itself, several lie side by side in it."""
    return folder if len(experiment.algorithms) == 1 else folder / method


def experiment_of(folder: Path, changes: Sequence[str] = ()) -> Experiment:
    """The settings that a run folder was made with, and these changes."""
    path = folder / "settings.json"
    if not path.is_file():
        raise SettingError(
            "FOLDER", str(folder), "must be a folder made by fedlamb run, compare or sweep"
        )
    return load_experiment(str(path), changes)


def summaries_of(experiment: Experiment, folder: Path) -> list[Summary]:
    """Of each method's run, from its metrics."""
    found = []
    for method in experiment.algorithms:
        place = _place(experiment, folder, method)
        if (place / "metrics.jsonl").exists():
            known = place / "summary.json"
            status: Status = "interrupted"
            lines = read_metrics(place)
            if known.exists():
                before = json.loads(known.read_text())
                status = before["status"]
                if len(lines) < before["rounds"]:
                    raise too_few(place, len(lines), before["rounds"])
            found.append(summary_of(method, status, experiment.target, lines))
    return found


def show(experiment: Experiment, folder: Path, summaries: list[Summary]) -> None:
    """Prints the table and draws the page."""
    table = Table(title=experiment.title or None, title_justify="left")
    for number, heading in enumerate(headings(experiment.target)):
        table.add_column(heading, justify="left" if number == 0 else "right", no_wrap=True)
    for row in rows(summaries):
        table.add_row(*row)
    console.print(table)
    for s in summaries:
        if s.status == "interrupted":
            console.print(f"{s.method}: {s.rounds} of {experiment.federation.rounds} rounds done")
        lost = (s.best_accuracy or 0.0) - (s.final_accuracy or 0.0)
        if s.status == "finished" and lost > LOST:
            of = f"-s algorithms.{s.method}"
            console.print(
                f"{s.method}: ends {100 * lost:.0f} points below its best; a lower rate or a "
                f"schedule may keep it ({of}.lr=…, {of}.schedule='{{after=[{s.best_round}]}}')",
                soft_wrap=True,
            )
    begun = [s.method for s in summaries]
    left = [method for method in experiment.algorithms if method not in begun]
    if left:
        console.print(f"Not begun: {', '.join(left)}", soft_wrap=True)
    if left or any(s.status == "interrupted" for s in summaries):
        console.print(f"Go on with: fedlamb resume {folder}", soft_wrap=True)
    console.print(f"Run folder: {folder}", soft_wrap=True)
    if page.available():
        metrics = {s.method: read_metrics(_place(experiment, folder, s.method)) for s in summaries}
        page.write_page(folder / "report.html", experiment.complete(), metrics, summaries)
        console.print(f"Report: {folder / 'report.html'}", soft_wrap=True)


LOST = 0.1  # of accuracy, from a run's best round to its last
