"""The vectorised executor: `vmap` of the client round, over clients and over trials.

A trial is one federation: `fit` has one, a sweep has many. The clients of a round, and the trials,
become axes of every tensor, so that small models cost few, large operations. Clients of unequal
sizes are padded by rows of weight 0; where all are equal, nothing is padded.
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..algorithm import AnyAlgorithm
from ..errors import SettingError
from ..plan import Plan
from ..randomness import own_random_state
from ..tasks.task import Task
from ..trees import Tree
from .allocator import keep_freed_memory
from .client_store import ClientStore
from .compiled import Compiled
from .cuda_graph import Replayed
from .functional import Functional
from .laid_out import Cohorts, Layout, longest_first, part_of
from .lanes import Lanes
from .messages import take_apart
from .nested import tree_leaves, tree_map
from .planned import Planned
from .running_mean import RunningMean
from .saying import leads, say
from .stacked.layers import with_stacked_convolutions
from .stacked_round import Form, stacked_round
from .work import (
    Assignment,
    Collected,
    OnClient,
    Upload,
    average_buffers,
    clients_of,
    weights_of,
)


class Trial(NamedTuple):
    """One federation in one round."""

    algorithm: AnyAlgorithm
    sent: Any
    buffers: Tree
    store: ClientStore
    work: Sequence[Assignment]


class Family(NamedTuple):
    """Algorithms of one kind that differ in some numbers."""

    algorithm: AnyAlgorithm
    """One of them."""
    varied: tuple[str, ...]
    """The fields in which they differ."""

    @staticmethod
    def of(algorithms: Sequence[Any]) -> "Family":
        """The smallest that holds all of these."""
        first, *rest = algorithms
        names = [f.name for f in fields(first)]
        varied = [n for n in names if any(getattr(a, n) != getattr(first, n) for a in rest)]
        return Family(first, tuple(varied))

    def with_(self, algorithms: Sequence[Any]) -> "Family":
        """The smallest that holds these, too; itself where it does already."""
        more = Family.of([self.algorithm, *algorithms]).varied
        return self._replace(varied=tuple(dict.fromkeys(self.varied + more)))


class Vectorised:
    """Runs a cohort as one batched program, as many clients at once as fit the memory."""

    def __init__(
        self,
        algorithm: AnyAlgorithm,
        task: Task,
        plan: Plan,
        weighting: str,
        store: ClientStore,
        compile: bool = False,
    ) -> None:
        self.algorithm, self.store = algorithm, store
        self.stack = Stack(task)
        self._plan, self._compile = plan, compile and repeats(plan)
        self._planned = Planned(plan, task.augments, weighting)

    def run(self, round: int, sent: Any, buffers: Tree, on_client: OnClient) -> Collected:
        """One round of the plan's cohort; changes nothing but what it returns."""
        trial = Trial(self.algorithm, sent, buffers, self.store, self._planned.work(round))
        compile = self._compile and compiles(round)
        family, seed = Family(self.algorithm, ()), noise(self._plan, round)
        (collected,) = self.stack.run([trial], on_client, family, seed, compile)
        return collected

    def prepare(self, round: int) -> None:
        """Plans the round, and lays its batches out on the device."""
        self.stack.prepare([self._planned.work(round)])

    def measure(self, params: Tree, buffers: Tree) -> dict[str, Tensor]:
        """What the task measures of the model."""
        return self.stack.measure_one(params, buffers)

    def plan_ahead(self, go_on: bool = True) -> None:
        """Has rounds planned beside this process, for a device that would wait for it, or ends
        that."""
        self._planned.plan_ahead(go_on)


def compiles(round: int) -> bool:
    """Whether compiling pays in this round; the first is unlike the others under most methods.

    The number alone decides, not what ran before: a run that goes on after a stop then takes the
    same programs, to the same bits. So does `repeats`.
    """
    return round > 1


def repeats(plan: Plan) -> bool:
    """Whether rounds repeat each other, so that compiling one serves others; if not, says so."""
    if not plan.repeats and leads():
        say("not compiled: clients of other sizes in each round would be compiled again and again")
    return plan.repeats


def noise(plan: Plan, round: int) -> int:
    """The seed for random layers of one's own, in the round of all clients of a plan together."""
    return plan.model_seed(round, plan.cohort(round)[0])


class Stack:
    """Runs the clients of many trials together; all trials share data and model."""

    def __init__(self, task: Task) -> None:
        keep_freed_memory()
        if task.precision != "float32":
            raise SettingError(
                "executor",
                "vectorised",
                f"works in float32, and precision is {task.precision!r}; use executor='loop'",
            )
        self.task = task
        model = copy.deepcopy(task.model)
        self._gradients = Functional(task, with_stacked_convolutions(model))
        self._at_once: int | None = None
        self._measures_alike = task.measures_alike
        self._replayed = Replayed() if task.device.type == "cuda" else None
        self._compiled, self._lanes = Compiled(), Lanes(task)
        self._layout = Layout(next(iter(task.params.values())), self._gradients.keyed)

    def run(
        self,
        trials: Sequence[Trial],
        on_client: OnClient,
        family: Family,
        seed: int,
        compile: bool = False,
    ) -> list[Collected]:
        """One round of every trial's cohort, as many clients at once as fit; the trials'
        algorithms are of this family. `seed` is for random layers that take no key."""
        cohort = len(trials[0].work)
        # The longest first, so that those who are still at work are always in front.
        queues = [longest_first(t.work) for t in trials]
        sums = [_Sum() for _ in trials]
        done = 0
        with torch.no_grad(), own_random_state(self.task.device, seed):
            while done < cohort:
                count = min(self._at_once or cohort, cohort - done)
                part = [
                    t._replace(work=part_of(q, done, count))
                    for t, q in zip(trials, queues, strict=True)
                ]
                try:
                    with _said_of_vmap():
                        found = self._together(part, family, compile)
                except torch.OutOfMemoryError as error:
                    self._at_once = self._halved(count, error)
                    continue
                for total, chunk in zip(sums, found, strict=True):
                    total.add(chunk)
                done += count
                on_client(done, cohort)
        return [total.collected(t.buffers) for total, t in zip(sums, trials, strict=True)]

    def _halved(self, count: int, error: Exception) -> int:
        if count == 1:
            raise SettingError(
                "executor",
                "vectorised",
                "does not fit into the device's memory even with one client at a time; use a "
                "smaller batch_size, or executor='loop'",
            ) from error
        if self._replayed is not None:
            self._replayed.clear()
        torch.cuda.empty_cache()
        said = f"out of device memory with {count} clients at once; trying {count // 2}"
        say(said)
        return count // 2

    def _together(self, trials: Sequence[Trial], family: Family, compile: bool) -> list["_Chunk"]:
        """These clients in one program."""
        inputs, form = self._inputs(trials, family)
        compiled = self._compiled if compile else None
        program = partial(stacked_round, self._gradients, form, compiled, self._lanes)
        if self._replayed is None:
            outputs = program(tree_map(torch.clone, inputs))  # of its own, as a graph has them
        else:
            outputs = self._replayed((form.key, compile), program, inputs)
        states, mean, largest = outputs
        found = []
        for i, trial in enumerate(trials):
            of: Callable[[Any], Any] = partial(tree_map, lambda t, i=i: t[i])
            kept = trial.store.unstacked(clients_of(trial.work), tree_leaves(of(states)))
            found.append(_Chunk(kept, of(mean), of(largest), sum(weights_of(trial.work))))
        return found

    def measure(self, states: Sequence[tuple[Tree, Tree]]) -> list[dict[str, Tensor]]:
        """What the task measures of these (params, buffers), all at once."""
        with _said_of_vmap():
            return self.task.measure_many(states, self._gradients.model)

    def measure_one(self, params: Tree, buffers: Tree) -> dict[str, Tensor]:
        """The same of one."""
        if self._replayed is None or not self._measures_alike:
            return self.task.measure(params, buffers)

        def measured(state: tuple[Tree, Tree]) -> dict[str, Tensor]:
            return self.task.measured(*state)

        try:
            with torch.no_grad(), own_random_state(self.task.device):
                found: dict[str, Tensor] = self._replayed("measure", measured, (params, buffers))
                return found
        except torch.OutOfMemoryError:  # a graph keeps memory of its own
            self._measures_alike = False
            return self.task.measure(params, buffers)

    def prepare(self, work: Cohorts) -> None:
        """Lays out this work, or as much as is done at once, on the device ahead of its round."""
        self._layout.prepare([part_of(longest_first(w), 0, self._at_once or len(w)) for w in work])

    def _inputs(self, trials: Sequence[Trial], family: Family) -> tuple[dict[str, Any], Form]:
        """All that differs between rounds as tensors; all that does not as a form."""
        device = self.task.device
        like = next(iter(self.task.params.values()))
        messages = [take_apart(t.sent, like) for t in trials]
        varied = {n: [getattr(t.algorithm, n) for t in trials] for n in family.varied}
        schedule, batches, data, shares = self._layout.of([t.work for t in trials])
        ragged = "weights" in batches or "weights" in data
        if ragged and self.task.buffers:
            raise SettingError(
                "executor",
                "vectorised",
                "cannot pad clients of different sizes for a model with buffers such as batch "
                "norm's; use executor='loop', or a model with group norm",
            )
        clients = [clients_of(t.work) for t in trials]
        states = [t.store.stacked(c) for t, c in zip(trials, clients, strict=True)]
        structure = trials[0].store.structure
        inputs: dict[str, Any] = {
            "sent": _stacked([m.tensors for m in messages]),
            "varied": {
                # In float32, 1 - beta would lose three digits.
                n: torch.tensor(v, dtype=torch.float64, device=device)
                for n, v in varied.items()
            },
            "buffers": {
                n: _side_by_side([t.buffers[n] for t in trials]) for n in trials[0].buffers
            },
            "states": _stacked(states),
            "batches": batches,
            "data": data,
            "shares": shares,
        }
        _, together, flags = messages[0]
        return inputs, Form(family.algorithm, together, flags, structure, schedule)


@contextmanager
def _said_of_vmap() -> Iterator[None]:
    """What vmap cannot do becomes an error that names the executor that can."""
    try:
        yield
    except RuntimeError as error:
        said, *_ = re.split(r"[.;] ", str(error))
        if "vmap" not in said and "atching rule" not in said:
            raise
        right = f"cannot run this model or algorithm ({said}); use executor='loop'"
        raise SettingError("executor", "vectorised", right) from error


class _Chunk(NamedTuple):
    """What one trial's clients left behind."""

    states: Mapping[int, Any]
    mean: Upload
    largest: Tree
    weight: float


class _Sum:
    """The chunks of one trial."""

    def __init__(self) -> None:
        self._mean = RunningMean()
        self._states: Mapping[int, Any] = {}
        self._largest: Tree = {}

    def add(self, chunk: _Chunk) -> None:
        self._mean.add(chunk.mean, chunk.weight)
        self._states = {**self._states, **chunk.states} if self._states else chunk.states
        before = self._largest
        self._largest = {n: torch.maximum(b, before.get(n, b)) for n, b in chunk.largest.items()}

    def collected(self, buffers: Tree) -> Collected:
        mean: Upload = self._mean.value
        moved = average_buffers(buffers, mean.buffers, self._largest)
        return Collected(mean.report, moved, mean.loss["loss"], self._states)


def _stacked(lists: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [_side_by_side(parts) for parts in zip(*lists, strict=True)]


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """With one more axis in front; a single one stays where it is."""
    return parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack([*parts])
