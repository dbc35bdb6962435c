"""`fit`: a federation as an iterator of rounds."""

import math
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from numbers import Real
from operator import is_not
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from ..algorithm import AnyAlgorithm
from ..errors import SettingError, whole_number
from ..plan import Plan, cohort_size
from ..tasks.partition import PerRound, Rows
from ..tasks.task import Task
from ..trees import Tree
from ..wire import downlink_bytes, kept_versions, nbytes, uplink_bytes
from . import saved
from .arguments import check_algorithm, check_smallest_batch, client_rows
from .client_store import ClientStore
from .compiled_loop.outputs import CompiledOutputs
from .crew import Crew
from .distributed import Distributed, Share
from .findings import Findings, Told, largest, read
from .loop import Loop
from .nested import tree_flatten
from .vectorised import Vectorised
from .work import Collected, OnClient

Weighting = Literal["uniform", "examples"]
ExecutorName = Literal["auto", "loop", "vectorised"]


@dataclass(frozen=True)
class Round:
    """One finished round."""

    number: int
    """From 1 on."""
    clients: list[int]
    """The clients that took part."""
    metrics: dict[str, float]
    """`train_loss`: mean over the local steps; `test_loss` and the task's metrics afterwards."""
    uplink_bytes: int
    """Sent by all clients of the round together."""
    downlink_bytes: int
    """Sent to all clients of the round together."""
    seconds: float


class Traffic(NamedTuple):
    """The bytes of a round."""

    up: int
    down: int


def fit(
    algorithm: AnyAlgorithm,
    task: Task,
    *,
    clients: Sequence[Any] | PerRound,
    rounds: int,
    fraction: float = 1.0,
    batch_size: int = 128,
    epochs: int = 1,
    weighting: Weighting = "uniform",
    seed: int = 0,
    executor: ExecutorName = "auto",
    compile: bool = False,
) -> "Run":
    """A federation that trains `task` by `algorithm`; iterate over it to run its rounds.

    clients: the rows of the training data that each client holds, or `PerRound`, which deals all
        rows anew to the active clients in each round.
    rounds: how many rounds the iterator runs.
    fraction: the share of clients in each round; max(1, floor(fraction * n)) of them.
    batch_size, epochs: local minibatches (the last may be smaller) and passes over the rows.
    weighting: the mean over clients, "uniform" or by number of "examples".
    seed: decides cohorts, batches and random layers. Same seed, same bits.
    executor: how clients are run: "loop", "vectorised", or the better one for this model and
        device. The trajectory is the same, to rounding.
    compile: whether local steps, and on a CPU full gradients and the test pass, are compiled first,
        which takes some to tens of seconds and pays for long runs; on a CPU it needs g++.
    """
    if not isinstance(task, Task):
        right = "must be a fedlamb.Task(model, train=..., test=...)"
        raise SettingError("task", type(task).__name__, right)
    rounds = whole_number("rounds", rounds, 1)
    batch_size, epochs = (
        whole_number("batch_size", batch_size, 1),
        whole_number("epochs", epochs, 1),
    )
    seed = whole_number("seed", seed, 0)
    if isinstance(fraction, bool) or not isinstance(fraction, Real) or not 0 < fraction <= 1:
        raise SettingError("fraction", fraction, "must be above 0 and at most 1, for example 0.5")
    if weighting not in ("uniform", "examples"):
        raise SettingError("weighting", weighting, "must be 'uniform' or 'examples'")
    if not isinstance(compile, bool):
        raise SettingError("compile", compile, "must be True or False")
    check_algorithm(algorithm)
    fraction = float(fraction)
    rows: Rows | PerRound
    if isinstance(clients, PerRound):
        rows = clients
        active = cohort_size(clients.n, fraction)
        parts = len(client_rows(clients.deal(active, seed), task))
        if parts != active:
            right = f"must deal to the {active} clients of a round, as many as it is asked for"
            raise SettingError("clients.deal", f"{parts} parts", right)
    else:
        rows = client_rows(clients, task)
    plan = Plan(rows, fraction=fraction, batch_size=batch_size, epochs=epochs, seed=seed)
    check_smallest_batch(task, plan)
    return Run(algorithm, task, plan, weighting, rounds, executor, compile)


class _Launched(NamedTuple):
    """A round whose work is all asked for; a GPU may still be at it."""

    starts_from: tuple[Any, Tree]
    """The server's state and the buffers before it."""
    sent: Any
    collected: Collected
    server: Any
    found: Findings


class Run(Iterator[Round]):
    """A federation under way: `for r in run` runs its rounds, one by one.

    `params` and `buffers` are the global model now, `model()` is a module that holds them,
    `number` the rounds done. `save` and `restore` carry a run across processes, bit for bit.
    """

    def __init__(
        self,
        algorithm: AnyAlgorithm,
        task: Task,
        plan: Plan,
        weighting: Weighting,
        rounds: int,
        executor: ExecutorName,
        compile: bool,
    ) -> None:
        self.algorithm, self.task, self.plan = algorithm, task, plan
        self.weighting, self.rounds = weighting, rounds
        self.number = 0
        # A copy: an algorithm of one's own that changes it in place must not reach the task.
        self.server = algorithm.server_init({name: p.clone() for name, p in task.params.items()})
        self._check_server("server_init", self.server)
        self.buffers = task.buffers
        self.store = ClientStore(lambda: algorithm.client_init(task.params))
        self.on_client: OnClient = lambda done, cohort: None
        """Told during a round how many clients of the cohort are done."""
        self.executor, self.reason = choose(executor, task)
        """Which one runs the clients, and why."""
        self.known_as: dict[str, Any] | None = None
        self.crew = Crew.join(task.device)
        """The processes that share this run."""
        self._executor = self._built(compile)
        on_cpu = task.device.type == "cpu" and self.executor == "loop"
        self._outputs_of = CompiledOutputs(task) if compile and on_cpu else None
        self.changed: Mapping[int, Any] = {}
        """The states of this process's clients that the last round changed."""
        self._judged: tuple[Any, bool] | None = None
        """A server's state, and whether its model diverged."""
        on_gpu = task.device.type == "cuda" and self.executor == "vectorised"
        self._looks_ahead = on_gpu and self.crew.size == 1
        """Whether a round is launched before the one before it is told: a GPU goes from one to the
        next at once, and small models leave it nothing else to do in between."""
        self._ahead: _Launched | None = None

    def _built(self, compile: bool) -> Any:
        kinds: dict[str, Any] = {"loop": Loop, "vectorised": Vectorised}
        kind = partial(kinds[self.executor], compile=compile)
        if self.crew.size == 1:
            return kind(self.algorithm, self.task, self.plan, self.weighting, self.store)
        stateless = not tree_flatten(self.store.fresh())[0]
        share = Share(self.plan, self.crew, stateless)
        own = kind(self.algorithm, self.task, share, self.weighting, self.store)
        return Distributed(own, share, self.weighting, self.store)

    def _check_server(self, function: str, server: Any) -> None:
        """Every server state holds the whole model."""
        params = getattr(server, "params", None)
        shapes = {name: p.shape for name, p in self.task.params.items()}
        if not isinstance(params, dict) or {n: p.shape for n, p in params.items()} != shapes:
            right = f"must return from {function} a state whose `params` are the model's"
            raise SettingError("algorithm", type(self.algorithm).__name__, right)

    def share_programs(self, other: "Run") -> bool:
        """Takes over what another run has compiled and recorded; says whether it could take all.

        All, where the runs have the same data, model and method and differ in rates, seed, split
        and start alone; only the model's part under another method; nothing otherwise.
        """
        one, two = self._executor, other._executor
        if not isinstance(one, Loop) or not isinstance(two, Loop):
            return False
        whole = one.share(two)
        if one.gradients is two.gradients:
            self._outputs_of = other._outputs_of
        return whole

    @property
    def params(self) -> Tree:
        """The global model's parameters."""
        params: Tree = self.server.params
        return params

    @property
    def diverged(self) -> bool:
        """Whether the global model holds a number that is not finite; no round can mend that."""
        if self._judged is None or self._judged[0] is not self.server:
            like = next(iter(self.task.params.values()))
            self._judged = self.server, not math.isfinite(largest(self.params, like))
        return self._judged[1]

    def model(self) -> nn.Module:
        """A copy of the task's model that holds the global parameters and buffers; in the mode that
        it was given in, so call `eval()` before it predicts."""
        return self.task.model_with(self.params, self.buffers)

    def __iter__(self) -> "Run":
        return self

    def __next__(self) -> Round:
        """Runs one round. If it fails or is interrupted, the run stays as it was before it."""
        if self.number < self.rounds and self.diverged:
            said = f"the model is no longer finite after round {self.number} of {self.rounds}"
            warnings.warn(f"{said}; a lower rate may help", RuntimeWarning, stacklevel=2)
        if self.number >= self.rounds or self.diverged:
            raise StopIteration
        start = time.perf_counter()
        now, before = self._ahead, (self.server, self.buffers)
        if now is None or any(map(is_not, now.starts_from, before)):
            now = self._launch(self.number + 1, before, self.on_client)
        ahead = None
        if self._looks_ahead and self.number + 1 < self.rounds:
            # What fails here is no fault of this round: the next one will meet it, and tell.
            with suppress(Exception), self.store.ahead(now.collected.states):
                after = now.server, now.collected.buffers
                ahead = self._launch(self.number + 2, after, lambda done, cohort: None)
        traffic = self.traffic(now.sent, now.collected)
        asked = time.perf_counter()
        (told,) = read([now.found])
        self._ahead = None if told.diverged else ahead
        ended = time.perf_counter()
        seconds = ended - start
        idle = ahead is not None and ended - asked < _SOON * seconds
        if idle and self.number > 2 and self.rounds - self.number > _WORTH_IT:
            self._executor.plan_ahead()  # the device waits for the host
        done = self.close(now.sent, now.collected, now.server, traffic, told, seconds)
        if self._looks_ahead and (self.number >= self.rounds or told.diverged):
            self._executor.plan_ahead(go_on=False)
        return done

    def _launch(self, number: int, before: tuple[Any, Tree], on_client: OnClient) -> _Launched:
        """Asks for all work of a round, and plans the next while the device is at it."""
        server, buffers = before
        with torch.no_grad():
            sent = self.algorithm.broadcast(server)
            collected = self._executor.run(number, sent, buffers, on_client)
            updated = self.algorithm.server_update(server, collected.report)
        if number == 1:
            self._check_server("server_update", updated)
        after = updated.params, collected.buffers
        if self.executor == "vectorised" and self.crew.size == 1:
            measured = self._executor.measure(*after)
        else:
            measured = self.task.measure(*after, self.crew, self._outputs_of)
        found = Findings.of(collected.loss, updated.params, measured)
        if number < self.rounds:
            with suppress(Exception):  # as above
                self._executor.prepare(number + 1)
        return _Launched(before, sent, collected, updated, found)

    def traffic(self, sent: Any, collected: Collected) -> Traffic:
        """What the round that is under way sends."""
        cohort = self.plan.cohort(self.number + 1)
        beside = nbytes(self.buffers)
        up = len(cohort) * (uplink_bytes(collected.report) + beside)
        # Many clients hold the same versions.
        held = Counter(tuple(self.store.versions(client).items()) for client in cohort)
        down = sum(n * (downlink_bytes(sent, dict(v)) + beside) for v, n in held.items())
        return Traffic(up, down)

    def close(
        self,
        sent: Any,
        collected: Collected,
        server: Any,
        traffic: Traffic,
        told: Told,
        seconds: float,
    ) -> Round:
        """Takes over a round that went well, and says what it was."""
        number = self.number + 1
        cohort = self.plan.cohort(number)
        self.server, self.buffers, self.number = server, collected.buffers, number
        self._judged = server, told.diverged
        self.store.commit(collected.states, cohort, kept_versions(sent))
        self.changed = collected.states
        return Round(number, cohort, told.metrics, *traffic, seconds)

    def save(self, path: str | Path) -> None:
        """Writes everything that the next round depends on into one file."""
        saved.save(self, Path(path))

    def restore(self, path: str | Path) -> None:
        """Takes the state that `save` wrote for a run with the same settings."""
        saved.restore(self, Path(path))


AS_ASKED = "as asked"


def choose(executor: ExecutorName, task: Task) -> tuple[str, str]:
    """The executor's name and why it is the one."""
    if executor == "auto":
        return _best(task)
    if executor not in ("loop", "vectorised"):
        raise SettingError("executor", executor, "must be 'auto', 'loop' or 'vectorised'")
    return executor, AS_ASKED


def _best(task: Task) -> tuple[str, str]:
    size = sum(p.numel() for p in task.params.values())
    if task.precision != "float32":
        return "loop", "reduced precision does not run vectorised"
    if task.buffers:
        return "loop", "the model has buffers, such as batch norm's"
    if task.device.type == "cuda" and size <= _SMALL:
        return "vectorised", f"a small model ({size:,} parameters) on a GPU"
    if task.device.type == "cuda":
        return "loop", f"a model of {size:,} parameters fills the GPU by itself"
    return "loop", "on a CPU"


_SMALL = 5_000_000  # parameters
_SOON = 0.05  # of a round's time
_WORTH_IT = 20  # rounds, of a few milliseconds each, for a process that takes some twenty
