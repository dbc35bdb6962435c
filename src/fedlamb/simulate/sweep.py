"""A grid of hyper-parameters and seeds as one program: trials are one more vectorised axis."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import product
from typing import Any, NamedTuple

import torch

from ..algorithm import AnyAlgorithm
from ..errors import SettingError
from ..tasks.task import Task
from .fit import Round, Run, fit
from .messages import take_apart
from .vectorised import Stack, Trial
from .work import assignments


class Point(NamedTuple):
    """One trial of a sweep: its hyper-parameters, its seed, and its run."""

    values: dict[str, Any]
    seed: int
    run: Run


def sweep(
    algorithm: AnyAlgorithm,
    task: Task,
    *,
    grid: Mapping[str, Sequence[Any]],
    seeds: Sequence[int] = (0,),
    compile: bool = False,
    **options: Any,
) -> "Sweep":
    """Every combination of the grid's values with every seed; results equal separate runs.

    grid: field of the algorithm -> its values, for example {"lr": [0.01, 0.03]}.
    options: as for `fit`: clients, rounds, fraction, batch_size, epochs, weighting, compile.
    """
    if not seeds:
        raise SettingError("seeds", seeds, "must name at least one seed, for example (0, 1, 2)")
    for name, values in grid.items():
        known = [f.name for f in fields(algorithm)]  # type: ignore[arg-type]
        if name not in known:
            raise SettingError("grid", name, f"must name fields of the algorithm: {known}")
        if isinstance(values, str) or not isinstance(values, Sequence) or len(values) == 0:
            raise SettingError(f"grid[{name!r}]", values, "must be a list of values")
    combinations = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    changed: Any = algorithm
    return Sweep(
        [
            Point(values, seed, fit(replace(changed, **values), task, seed=seed, **options))
            for values in combinations
            for seed in seeds
        ],
        compile,
    )


class Sweep(Iterator[list[Round | None]]):
    """Trials under way together: `for rounds in sweep` runs one round of all of them.

    `points` are the trials in order; a round is None for a trial that has diverged or is done.
    Trials that share data, model and kind of algorithm run as one program.
    """

    def __init__(self, points: Sequence[Point], compile: bool = False) -> None:
        self.points, self._compile = list(points), compile
        self._stacks: dict[Any, Stack] = {}
        self._at_once: dict[Any, int] = {}

    def __iter__(self) -> "Sweep":
        return self

    def __next__(self) -> list[Round | None]:
        groups: dict[Any, list[int]] = {}
        for i, point in enumerate(self.points):
            run = point.run
            if run.number < run.rounds and not run.diverged:
                groups.setdefault(_kind(run), []).append(i)
        if not groups:
            raise StopIteration
        found: list[Round | None] = [None] * len(self.points)
        for kind, members in groups.items():
            first = self.points[members[0]].run
            if kind[0] not in self._stacks:
                self._stacks[kind[0]] = Stack(first.task, self._compile)
            stack = self._stacks[kind[0]]
            # Once for all: another number of trials is another program, to be compiled again.
            most = self._at_once.setdefault(kind[0], _trials_at_once(first))
            for start in range(0, len(members), most):
                some = members[start : start + most]
                rounds = _advance(stack, [self.points[i].run for i in some])
                for i, done in zip(some, rounds, strict=True):
                    found[i] = done
        return found


def _advance(stack: Stack, runs: Sequence[Run]) -> list[Round]:
    """One round of these runs, together."""
    begun = time.perf_counter()
    with torch.no_grad():
        sent = [run.algorithm.broadcast(run.server) for run in runs]
        trials = [
            Trial(run.algorithm, message, run.buffers, run.store, _work(run))
            for run, message in zip(runs, sent, strict=True)
        ]
        collected = stack.run(trials, lambda done, cohort: None)
        servers = [
            run.algorithm.server_update(run.server, c.report)
            for run, c in zip(runs, collected, strict=True)
        ]
    after = [(s.params, c.buffers) for s, c in zip(servers, collected, strict=True)]
    measured = runs[0].task.evaluate_many(after)
    seconds = (time.perf_counter() - begun) / len(runs)
    parts = zip(runs, sent, collected, servers, measured, strict=True)
    return [run.close(m, c, s, found, seconds) for run, m, c, s, found in parts]


def _work(run: Run) -> list[Any]:
    return assignments(run.plan, run.number + 1, run.task.augments, run.weighting)


def _kind(run: Run) -> tuple[Any, ...]:
    """The same for runs that can go together: data and model, and all that is not a number."""
    algorithm = run.algorithm
    fixed = tuple(
        (f.name, value)
        for f in fields(algorithm)  # type: ignore[arg-type]
        if not isinstance(value := getattr(algorithm, f.name), float)
    )
    like = next(iter(run.params.values()))
    flags = take_apart(algorithm.broadcast(run.server), like).flags
    place = run.task.train[0].data_ptr(), run.task.test[0].data_ptr()
    shape = tuple((name, p.shape, p.dtype) for name, p in run.params.items())
    return (place, shape), type(algorithm), fixed, flags, len(run.plan.cohort(run.number + 1))


def _trials_at_once(run: Run) -> int:
    """How many trials fit: some dozen copies of each client's model, and its activations."""
    size = sum(p.numel() * p.element_size() for p in run.params.values())
    x, _ = run.task.train
    rows = run.plan.batch_size * (x[0].numel() * 4 + _ACTIVATIONS)
    each = len(run.plan.cohort(run.number + 1)) * (12 * size + rows)
    if run.task.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(run.task.device)
        return max(1, int(0.5 * free / each))
    return max(1, int(2 * 2**30 / each))


_ACTIVATIONS = 200_000  # bytes for each example, of models such as the paper's CNN
