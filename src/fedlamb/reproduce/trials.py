"""Trials: points of a grid under seeds, as runs that share data, model and splits."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..experiment import build_clients, build_run, build_task, device_of, load_data
from ..records import RunFolder, conduct
from ..settings import Experiment
from ..simulate.fit import Round, Run
from ..simulate.sweep import Point, Sweep, Together
from ..tasks.datasets import Dataset
from ..tasks.decoded import Report
from ..tasks.task import Task
from .results import Line

Told = Callable[[int, int, float | None], None]
"""Rounds done, rounds in all, best accuracy so far."""


class Bench:
    """What the trials of a panel share: its data, a task and a split for each seed, programs."""

    def __init__(self, together: Together) -> None:
        self._together = together
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

    def run_together(self, points: Sequence[Point], told: Told) -> list[list[Line]]:
        """The lines of all rounds of each trial, run as one program."""
        found: list[list[Line]] = [[] for _ in points]
        best: float | None = None
        for number, done in enumerate(Sweep(points, self._together), 1):
            for lines, one in zip(found, done, strict=True):
                if one is not None:
                    lines.append(_line(one))
                    best = max(best or 0.0, one.metrics["test_accuracy"])
            told(number, points[0].run.rounds, best)
        return found

    def run_alone(self, point: Point, partial: Path, told: Told) -> list[Line]:
        """The same for one trial; its rounds are kept in a folder until it is done."""
        if self._last is not None:
            point.run.share_programs(self._last)
        self._last = point.run
        return _run_alone(point, partial, told)


def _run_alone(point: Point, partial: Path, told: Told) -> list[Line]:
    """A twentieth of the time goes into saving: a round of a large model saves in longer than it
    runs."""
    folder = RunFolder(partial)
    if not folder.journal.exists():
        folder.create({"values": point.values, "seed": point.seed})
    best: float | None = None

    def on_round(done: Round) -> None:
        nonlocal best
        best = max(best or 0.0, done.metrics["test_accuracy"])
        told(done.number, point.run.rounds, best)

    conduct(point.run, folder, on_round, stop=lambda: False, saving=0.05)
    lines = folder.metrics()
    shutil.rmtree(partial)
    return lines


def _line(done: Round) -> Line:
    return {
        "round": done.number,
        **done.metrics,
        "uplink_bytes": done.uplink_bytes,
        "downlink_bytes": done.downlink_bytes,
        "seconds": done.seconds,
    }
