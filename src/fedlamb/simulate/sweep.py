"""A grid of hyper-parameters and seeds as one program: trials are one more vectorised axis."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from itertools import product
from typing import Any, NamedTuple

import torch

from ..algorithm import AnyAlgorithm
from ..errors import SettingError
from ..tasks.task import Task
from .findings import Findings, read
from .fit import AS_ASKED, Round, Run, fit
from .messages import take_apart
from .vectorised import Family, Stack, Trial, compiles, noise
from .work import Assignment, assignments


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
    seeds: for example (0, 1, 2).
    compile: whether programs are compiled first, as for `fit`.
    options: as for `fit`: clients, rounds, fraction, batch_size, epochs, weighting, executor.
    Models with buffers such as batch norm's, or in reduced precision, are run one after another.
    """
    if isinstance(seeds, int) or len(seeds) == 0 or len({*seeds}) < len(seeds):
        raise SettingError("seeds", seeds, "must name one or more seeds, for example (0, 1, 2)")
    if "seed" in options:
        raise SettingError("seed", options["seed"], f"must be given as seeds=({options['seed']},)")
    if not isinstance(grid, Mapping):
        raise SettingError("grid", grid, "must name fields, for example {'lr': [0.01, 0.03]}")
    for name, values in grid.items():
        known = [f.name for f in fields(algorithm)]  # type: ignore[arg-type]
        if name not in known:
            raise SettingError("grid", name, f"must name fields of the algorithm: {known}")
        if isinstance(values, str) or not isinstance(values, Sequence) or len(values) == 0:
            raise SettingError(f"grid[{name!r}]", values, "must be a list of values")
        if any(value in list(values)[:i] for i, value in enumerate(values)):
            raise SettingError(f"grid[{name!r}]", values, "must name each value once")
    combinations = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    changed: Any = algorithm
    points = []
    for values, seed in product(combinations, seeds):
        run = fit(replace(changed, **values), task, seed=seed, compile=compile, **options)
        points.append(Point(values, seed, run))
    return Sweep(points, Together(compile))


class Sweep(Iterator[list[Round | None]]):
    """Trials under way together: `for rounds in sweep` runs one round of all of them.

    `points` are the trials in order; a round is None for a trial that has diverged or is done.
    Trials that share data, model and kind of algorithm run as one program.
    """

    def __init__(self, points: Sequence[Point], together: "Together") -> None:
        self.points, self._together = list(points), together
        self.last: list[Round | None] = []
        """The last round of each trial; after an interrupt, of those that had ended it."""
        apart: list[Run] = []
        for run in (point.run for point in self.points if not _stacks(point.run)):
            if not any(run.share_programs(other) for other in apart):
                apart.append(run)

    def __iter__(self) -> "Sweep":
        return self

    def __next__(self) -> list[Round | None]:
        self.last = [None] * len(self.points)
        self._together.round([point.run for point in self.points], self.last)
        if not any(self.last):
            raise StopIteration
        return self.last


class Together:
    """Runs the rounds of many trials; keeps its programs, also for the trials of later sweeps.

    at_once: how many trials a program has; by default as many as fit. A fixed number serves
        sweeps of any length with the same compiled programs.
    """

    def __init__(self, compile: bool = False, at_once: int | None = None) -> None:
        self._compile, self._at_once = compile, at_once
        self._stacks: dict[Any, Stack] = {}
        self._most: dict[Any, int] = {}
        self._sizes: dict[Any, int] = {}
        self._families: dict[Any, Family] = {}
        self._planned: dict[Any, list[Assignment]] = {}
        """What clients do in this round and the next, once for all trials of a seed."""

    def round(self, runs: Sequence[Run], found: list[Round | None]) -> None:
        """One round of each, put into its place in `found`, where None stays for one that has
        diverged or is done."""
        kinds = [_kind(run) for run in runs]
        groups: dict[Any, list[int]] = {}
        for i, (kind, run) in enumerate(zip(kinds, runs, strict=True)):
            if run.number < run.rounds and not run.diverged:
                groups.setdefault(kind, []).append(i)
        for kind, members in groups.items():
            first = runs[members[0]]
            if not _stacks(first):
                for i in members:
                    found[i] = next(runs[i])
                continue
            if kind[0] not in self._stacks:
                self._stacks[kind[0]] = Stack(first.task)
            stack = self._stacks[kind[0]]
            alike = zip(kinds, runs, strict=True)
            family = self._family(kind, [r.algorithm for k, r in alike if k[:3] == kind[:3]])
            for some in self._chunks(kind, first, members):
                whole = len(some) == len(runs)
                rounds = self._advance(stack, family, [runs[i] for i in some], whole)
                for i, done in zip(some, rounds, strict=False):  # the rest are fillers
                    found[i] = done

    def _chunks(self, kind: Any, first: Run, members: list[int]) -> list[list[int]]:
        """As many trials at once as fit or as was asked for, the same number in each chunk.

        The number stays while more than half of its places are taken, since another one is
        another program, to be compiled and recorded again. A place left empty by a trial that
        has diverged is filled by one that has not, for nothing.
        """
        place = kind[0]
        if place not in self._most:
            fit = _trials_at_once(first)
            self._most[place] = min(fit, self._at_once or fit)
        size = self._sizes.get(kind)
        if self._at_once:
            self._sizes[kind] = size = self._most[place]
        elif size is None or 2 * len(members) <= size:
            chunks = -(-len(members) // self._most[place])
            self._sizes[kind] = size = -(-len(members) // chunks)
        cut = [members[i : i + size] for i in range(0, len(members), size)]
        return [some + some[:1] * (size - len(some)) for some in cut]

    def _family(self, kind: Any, algorithms: Sequence[AnyAlgorithm]) -> Family:
        """The same in every round and chunk, whatever trials are left; it grows where new trials
        differ from all before."""
        known = self._families.get(kind[:3])
        found = Family.of(algorithms) if known is None else known.with_(algorithms)
        self._families[kind[:3]] = found
        return found

    def _advance(
        self, stack: Stack, family: Family, runs: Sequence[Run], whole: bool
    ) -> list[Round]:
        """One round of these runs, together; of a run that fills places, only its first counts.

        `whole`: the next call will be for the same runs.
        """
        begun = time.perf_counter()
        with torch.no_grad():
            sent = [run.algorithm.broadcast(run.server) for run in runs]
            trials = [
                Trial(run.algorithm, message, run.buffers, run.store, self._work(run, 1))
                for run, message in zip(runs, sent, strict=True)
            ]
            compile = self._compile and all(r.plan.repeats and compiles(r.number + 1) for r in runs)
            seed = noise(runs[0].plan, runs[0].number + 1)
            collected = stack.run(trials, lambda done, cohort: None, family, seed, compile)
            servers = [
                run.algorithm.server_update(run.server, c.report)
                for run, c in zip(runs, collected, strict=True)
            ]
        after = [(s.params, c.buffers) for s, c in zip(servers, collected, strict=True)]
        found = [
            Findings.of(c.loss, s.params, measured)
            for c, s, measured in zip(collected, servers, stack.measure(after), strict=True)
        ]
        # Planned while the device is still busy. What fails here, the next round will tell.
        with suppress(Exception):
            ahead = [self._work(run, 2) for run in runs if run.number + 1 < run.rounds]
            if whole and len(ahead) == len(runs):
                stack.prepare(ahead)
        own = list(dict.fromkeys(runs))
        traffic = [r.traffic(m, c) for r, m, c in zip(own, sent, collected, strict=False)]
        told = read(found)
        seconds = (time.perf_counter() - begun) / len(own)
        parts = zip(own, sent, collected, servers, traffic, told, strict=False)
        return [run.close(*of_round, seconds) for run, *of_round in parts]

    def _work(self, run: Run, ahead: int) -> list[Assignment]:
        """What the run's clients do in the round that comes next, or in one after it."""
        plan, number = run.plan, run.number + ahead
        key = (id(plan.clients), plan.seed, plan.fraction, plan.batch_size, plan.epochs)
        whole = (*key, run.weighting, number)
        if whole not in self._planned:
            self._planned = {k: v for k, v in self._planned.items() if k[-1] >= number - 1}
            self._planned[whole] = assignments(plan, number, run.task.augments, run.weighting)
        return self._planned[whole]


def _stacks(run: Run) -> bool:
    """Whether trials like this one can run as one program; if not, they run one after another."""
    asked_for_loop = run.executor == "loop" and run.reason == AS_ASKED
    return run.task.precision == "float32" and not run.task.buffers and not asked_for_loop


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
