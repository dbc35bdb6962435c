"""Trials: points of a grid under seeds, as runs that share data, model and splits."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..experiment import build_clients, build_run, build_task, device_of, load_data
from ..records import Pace, RunFolder, conduct
from ..settings import Experiment
from ..simulate.fit import Round, Run
from ..simulate.sweep import Point, Sweep, Together
from ..simulate.work import OnClient
from ..tasks.datasets import Dataset
from ..tasks.decoded import Report
from ..tasks.task import Task
from .results import Line

Told = Callable[[int, int, float | None], None]
"""Rounds done, rounds in all, best accuracy so far."""


class Bench:
    """What the trials of a panel share: its data, a task and a split for each seed, programs."""

    def __init__(self, together: Together, on_client: OnClient = lambda done, cohort: None) -> None:
        self._together, self._on_client = together, on_client
        self._plain: tuple[Dataset, Dataset] | None = None
        self._shared: dict[int, tuple[Task, Any]] = {}
        self._last: Run | None = None

    def points(
        self,
        method: str,
        points: Sequence[tuple[dict[str, Any], Experiment]],
        decoded: Report = lambda done, total: None,
    ) -> list[Point]:
        """A run for each (values, experiment); the experiments differ in their seeds alone."""
        found = []
        for values, experiment in points:
            if experiment.seed not in self._shared:
                self._shared[experiment.seed] = self._prepared(experiment, decoded)
            task, clients = self._shared[experiment.seed]
            table = {**experiment.algorithms.get(method, {}), **values}
            changed = experiment.with_method(method, table)
            run = build_run(changed, method, task=task, clients=clients)
            found.append(Point(values, experiment.seed, run))
        return found

    def _prepared(self, experiment: Experiment, decoded: Report) -> tuple[Task, Any]:
        device = device_of(experiment.engine)
        if experiment.data.validation:  # what is held out depends on the seed
            data = load_data(experiment, decoded)
            there = data.to(device)
        else:
            if self._plain is None:
                data = load_data(experiment, decoded)
                self._plain = data, data.to(device)
            data, there = self._plain
        clients = build_clients(experiment.split, data, experiment.seed)
        return build_task(experiment, there), clients

    def run_together(
        self, points: Sequence[Point], partial: Sequence[Path], told: Told
    ) -> list[list[Line]]:
        """The lines of all rounds of each trial, run as one program.

        A folder for each keeps its rounds, and what is there already goes on: to the same bits, or,
        where a kill came in the middle of saving, to rounding. It is the caller's to remove.
        """
        folders = [_folder(path, point) for path, point in zip(partial, points, strict=True)]
        for folder, point in zip(folders, points, strict=True):
            if folder.journal.exists():
                folder.journal.read(point.run)
            folder.keep_rounds(point.run.number)
        best = max(_best(folder) for folder in folders)
        each = [(f, p, list[Round]()) for f, p in zip(folders, points, strict=True)]

        def write() -> None:
            for folder, point, rounds in each:
                # An interrupted round may have changed a run, and not be noted.
                if rounds and rounds[-1].number == point.run.number:
                    folder.append(*rounds)
                    folder.journal.write(point.run)
                    rounds.clear()

        noted = [point.run.number for point in points]

        def note(done: Sequence[Round | None]) -> None:
            for i, one in enumerate(done):
                if one is not None and one.number > noted[i]:
                    folder, point, rounds = each[i]
                    folder.journal.note(point.run)
                    rounds.append(one)
                    noted[i] = one.number

        pace, sweep = Pace(_SAVING), Sweep(points, self._together)
        try:
            for done in sweep:
                note(done)
                best = max([best, *(one.metrics["test_accuracy"] for one in done if one)])
                if pace.due():
                    with pace.saving():
                        write()
                told(max(point.run.number for point in points), points[0].run.rounds, best)
        except KeyboardInterrupt:
            note(sweep.last)  # of a round that only some of the programs had ended
            write()
            raise
        for folder, _, rounds in each:
            folder.append(*rounds)
        return [folder.metrics() for folder in folders]

    def run_alone(self, point: Point, partial: Path, told: Told) -> list[Line]:
        """The same for one trial."""
        if self._last is not None:
            point.run.share_programs(self._last)
        self._last = point.run
        point.run.on_client = self._on_client
        folder = _folder(partial, point)
        before, best = len(folder.metrics()), _best(folder)
        if before:  # it goes on
            told(before, point.run.rounds, best)

        def on_round(done: Round) -> None:
            nonlocal best
            best = max(best, done.metrics["test_accuracy"])
            told(done.number, point.run.rounds, best)

        conduct(point.run, folder, on_round, stop=lambda: False, saving=_SAVING)
        point.run.store.replace({}, {})  # the run is kept for its programs, not for its clients
        return folder.metrics()


def _folder(path: Path, point: Point) -> RunFolder:
    """The trial's, with the rounds that are there already."""
    folder = RunFolder(path)
    if not folder.journal.exists():
        folder.create({"values": point.values, "seed": point.seed})
    return folder


def _best(folder: RunFolder) -> float:
    return max((line["test_accuracy"] or 0.0 for line in folder.metrics()), default=0.0)


_SAVING = 0.05  # of the time; a round of a large model saves in longer than it runs
