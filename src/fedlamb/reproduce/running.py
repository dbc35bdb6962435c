"""Groups of trials are run, one after another or side by side, and their lines are written."""

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..experiment import load_data
from ..settings import Experiment, validate
from ..simulate.sweep import Point
from ..tasks.decoded import Report
from .panels import Panel
from .results import DIGITS, Line, Results
from .side_by_side import Job, Workers
from .study import SHARE, Group, Wanted, trial_key
from .trials import Bench, Told


def run_groups(
    wanted: Wanted,
    groups: Sequence[Group],
    results: Results,
    engine: Mapping[str, Any],
    bench: Bench | Workers,
    told: Callable[[str, int, int, float | None], None],
    decoded: Report,
) -> None:
    """Runs the trials that are left of the groups, and writes the line of each as it ends; side by
    side those of all groups at once."""
    each = [_Trials(wanted, group, results, engine) for group in groups]
    if not isinstance(bench, Workers):
        for trials in each:
            points = bench.points(trials.group.method, trials.points(), decoded)
            for number, lines in _one_by_one(bench, points, trials.partial, trials.group, told):
                trials.write(number, lines)
        return
    load_data(each[0].points()[0][1], decoded)  # which decodes it, once for all of them
    places = [(trials, number) for trials in each for number in range(len(trials.partial))]
    jobs = [trials.job(number) for trials, number in places]
    name = groups[0].label if len(groups) == 1 else f"{len(groups)} curves"
    for job, lines in bench.run(jobs, _named(told, f"{len(jobs)} trials of {name}:")):
        trials, number = places[job]
        trials.write(number, lines)


class _Trials:
    """What is left of a group, and where it goes."""

    def __init__(
        self, wanted: Wanted, group: Group, results: Results, engine: Mapping[str, Any]
    ) -> None:
        self.group, self._wanted, self._results = group, wanted, results
        self._experiments = {
            seed: experiment_of(wanted.panel, group, seed, wanted.select, engine)
            for seed in {seed for _, seed in group.points}
        }
        keys = [
            trial_key(group.method, values, seed, group.rounds, wanted.select)
            for values, seed in group.points
        ]
        name = f"{wanted.panel.figure}-{wanted.panel.name}"
        self.partial = [results.folder / "partial" / f"{name}-{short_name(key)}" for key in keys]
        """Keeps the rounds of a trial while it runs."""
        self._waiting: dict[int, list[Line]] = {}
        self._written = 0
        self._session: int | None = None

    def points(self) -> list[tuple[dict[str, Any], Experiment]]:
        """Each trial's values, and its settings without them."""
        return [(values, self._experiments[seed]) for values, seed in self.group.points]

    def job(self, number: int) -> Job:
        """The trial for a process beside this one."""
        return Job(self.group.method, *self.points()[number], self.partial[number])

    def write(self, number: int, found: list[Line]) -> None:
        """Takes the rounds of a trial that has ended, and writes lines as far as their turn is.

        In the group's order, also where trials run side by side: of points that are equally good
        the first line is chosen. What ended before its turn waits in its folder.
        """
        self._waiting[number] = found
        while self._written in self._waiting:
            if self._session is None:
                self._session = self._begun()
            values, seed = self.group.points[self._written]
            lines = self._waiting.pop(self._written)
            trial = _trial(self.group, values, seed, self._wanted.select, lines, self._session)
            self._results.append(self._wanted.panel, trial)
            shutil.rmtree(self.partial[self._written])
            self._written += 1

    def _begun(self) -> int:
        common = self._experiments[min(self._experiments)].model_dump(mode="json")
        common["algorithms"] = {}
        common["data"]["root"] = None  # where it lay is nobody's business
        return self._results.begin(self._wanted.panel, common)


def _named(told: Callable[..., None], name: str) -> Told:
    return lambda *now: told(name, *now)


def _one_by_one(
    bench: Bench,
    points: Sequence[Point],
    partial: Sequence[Path],
    group: Group,
    told: Callable[[str, int, int, float | None], None],
) -> Iterator[tuple[int, list[Line]]]:
    """The number of each trial and the lines of its rounds; on a GPU small models run together."""
    first = points[0].run
    if first.task.device.type == "cuda" and first.executor == "vectorised":
        name = f"{group.label} × {len(points)}"
        told(name, 0, group.rounds, None)
        yield from enumerate(bench.run_together(points, partial, _named(told, name)))
        return
    for number, point in enumerate(points):
        name = f"{group.label} {number + 1}/{len(points)}"
        told(name, 0, group.rounds, None)
        yield number, bench.run_alone(point, partial[number], _named(told, name))


def experiment_of(
    panel: Panel, group: Group, seed: int, select: str, engine: Mapping[str, Any]
) -> Experiment:
    """The panel's settings for these trials."""
    table = json.loads(json.dumps(panel.settings))
    root = engine.get("root")
    table["data"] |= {"root": root} if root else {}
    if select == "validation":
        table["data"]["validation"] = SHARE
    table["federation"]["rounds"] = group.rounds
    table |= {
        "title": panel.title,
        "seed": seed,
        "engine": {k: engine[k] for k in ("device", "compile")},
    }
    return validate({**table, "algorithms": {group.method: group.points[0][0]}})


def _trial(
    group: Group, values: dict[str, Any], seed: int, select: str, lines: list[Line], session: int
) -> Line:
    names = ["test_accuracy", "train_loss", *(["validation_accuracy"] if select != "test" else [])]
    kept = {name: [_rounded(line[name]) for line in lines] for name in names}
    return {
        "method": group.method,
        "values": values,
        "seed": seed,
        "rounds": group.rounds,
        "select": select,
        "stage": group.stage,
        "status": "finished" if len(lines) == group.rounds else "diverged",
        **kept,
        "uplink_bytes": sum(line["uplink_bytes"] for line in lines),
        "downlink_bytes": sum(line["downlink_bytes"] for line in lines),
        "seconds": round(sum(line["seconds"] for line in lines), 3),
        "session": session,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, DIGITS)


def short_name(key: str) -> str:
    """For a folder, the same for the same trial."""
    return hashlib.sha256(key.encode()).hexdigest()[:16]
