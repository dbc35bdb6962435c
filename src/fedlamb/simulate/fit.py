"""`fit`: a federation as an iterator of rounds."""

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..algorithm import AnyAlgorithm
from ..checkpoint import load_checkpoint, save_checkpoint
from ..errors import SettingError, whole_number
from ..plan import Plan, cohort_size
from ..tasks.partition import PerRound
from ..tasks.task import Task
from ..trees import Tree
from ..wire import RecordError, downlink_bytes, kept_versions, nbytes, pack, unpack, uplink_bytes
from .client_store import ClientStore
from .loop import Loop
from .vectorised import Vectorised
from .work import Collected, Executor

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
    """
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
    for function in ("server_init", "client_step", "server_update"):
        if isinstance(algorithm, type) or not callable(getattr(algorithm, function, None)):
            raise SettingError(
                "algorithm", algorithm, "must be an algorithm such as fedlamb.FedLAMB(lr=0.01)"
            )
    fraction = float(fraction)
    rows: Sequence[Tensor] | PerRound
    if isinstance(clients, PerRound):
        rows = clients
        _client_rows(clients.deal(cohort_size(clients.n, fraction), seed), task)
    else:
        rows = _client_rows(clients, task)
    plan = Plan(rows, fraction=fraction, batch_size=batch_size, epochs=epochs, seed=seed)
    return Run(algorithm, task, plan, weighting, rounds, executor)


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
    ) -> None:
        self.algorithm, self.task, self.plan = algorithm, task, plan
        self.weighting, self.rounds = weighting, rounds
        self.number = 0
        self.server = algorithm.server_init(task.params)
        self.buffers = task.buffers
        self.store = ClientStore(lambda: algorithm.client_init(task.params))
        self.on_client: Callable[[int, int], None] = lambda done, cohort: None
        """Told during a round how many clients of the cohort are done."""
        self.executor, self.reason = choose(executor, task)
        """Which one runs the clients, and why."""
        kinds: dict[str, type[Executor]] = {"loop": Loop, "vectorised": Vectorised}
        self._executor: Any = kinds[self.executor](algorithm, task, plan, weighting, self.store)  # type: ignore[call-arg]

    @property
    def params(self) -> Tree:
        """The global model's parameters."""
        params: Tree = self.server.params
        return params

    @property
    def diverged(self) -> bool:
        """Whether the global model holds a number that is not finite; no round can mend that."""
        return not bool(torch.stack([torch.isfinite(p).all() for p in self.params.values()]).all())

    def model(self) -> nn.Module:
        """A copy of the task's model that holds the global parameters and buffers."""
        return self.task.model_with(self.params, self.buffers)

    def __iter__(self) -> "Run":
        return self

    def __next__(self) -> Round:
        """Runs one round. If it fails or is interrupted, the run stays as it was before it."""
        if self.number >= self.rounds or self.diverged:
            raise StopIteration
        start = time.perf_counter()
        with torch.no_grad():
            sent = self.algorithm.broadcast(self.server)
            collected = self._executor.run(self.number + 1, sent, self.buffers, self.on_client)
            server = self.algorithm.server_update(self.server, collected.report)
        metrics = self.task.evaluate(server.params, collected.buffers)
        return self.close(sent, collected, server, metrics, time.perf_counter() - start)

    def close(
        self,
        sent: Any,
        collected: Collected,
        server: Any,
        measured: Mapping[str, float],
        seconds: float,
    ) -> Round:
        """Takes over a round that went well, and says what it was."""
        number = self.number + 1
        cohort = self.plan.cohort(number)
        beside = nbytes(self.buffers)
        up = len(cohort) * (uplink_bytes(collected.report) + beside)
        down = sum(downlink_bytes(sent, self.store.versions(c)) + beside for c in cohort)
        metrics = {"train_loss": float(collected.loss), **measured}
        self.server, self.buffers, self.number = server, collected.buffers, number
        self.store.commit(collected.states, kept_versions(sent))
        return Round(number, cohort, metrics, up, down, seconds)

    def save(self, path: str | Path) -> None:
        """Writes everything that the next round depends on."""
        tensors = pack(_Global(self.server, self.buffers))
        for client, state in self.store.states.items():
            tensors |= {f"client/{client}/{name}": t for name, t in pack(state).items()}
        held = {str(client): versions for client, versions in self.store.held.items()}
        facts = {"number": self.number, "run": self._identity, "held": held}
        save_checkpoint(Path(path), tensors, facts)

    def restore(self, path: str | Path) -> None:
        """Takes the state that `save` wrote for a run with the same settings."""
        tensors, facts = load_checkpoint(Path(path))
        for key, mine in self._identity.items():
            if facts["run"].get(key) != mine:
                raise SettingError(
                    "checkpoint",
                    str(path),
                    f"was made with {key} = {facts['run'].get(key)!r}, "
                    f"and this run has {mine!r}; use the settings that it was made with",
                )
        states: dict[int, dict[str, Tensor]] = {}
        for name in [name for name in tensors if name.startswith("client/")]:
            _, client, rest = name.split("/", 2)
            states.setdefault(int(client), {})[rest] = tensors.pop(name)
        like = self.algorithm.client_init(self.task.params)
        try:
            server, buffers = unpack(tensors, like=_Global(self.server, self.task.buffers))
            found = {client: unpack(state, like) for client, state in states.items()}
            if set(buffers) != set(self.task.buffers):
                raise RecordError("the model's buffers are missing")
        except RecordError as error:
            raise SettingError(
                "checkpoint", str(path), f"does not fit the model; {error}"
            ) from error
        self.server, self.buffers, self.number = server, buffers, facts["number"]
        held = {int(client): versions for client, versions in facts["held"].items()}
        self.store.replace(found, held)

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """What must be the same for a resumed run to be the same run."""
        algorithm = describe(self.algorithm)
        if isinstance(algorithm, dict):
            algorithm = {f"algorithm.{key}": value for key, value in algorithm.items()}
        else:
            algorithm = {"algorithm": algorithm}
        digest = hashlib.sha256()
        for client in (
            self.plan.cohort(1)
            if isinstance(self.plan.clients, PerRound)
            else range(len(self.plan.clients))
        ):
            rows = self.plan.rows(1, client)
            digest.update(len(rows).to_bytes(8, "little") + rows.cpu().numpy().tobytes())
        return {
            **algorithm,
            "seed": self.plan.seed,
            "fraction": self.plan.fraction,
            "batch_size": self.plan.batch_size,
            "epochs": self.plan.epochs,
            "weighting": self.weighting,
            "clients": digest.hexdigest(),
            "data": _sample_digest(self.task),
        }


def choose(executor: ExecutorName, task: Task) -> tuple[str, str]:
    """The executor's name and why it is the one."""
    if executor == "auto":
        return _best(task)
    if executor not in ("loop", "vectorised"):
        raise SettingError("executor", executor, "must be 'auto', 'loop' or 'vectorised'")
    return executor, "as asked"


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


class _Global(NamedTuple):
    """What the server holds."""

    server: Any
    buffers: Tree


def _sample_digest(task: Task) -> str:
    """Tells one data set from another by its shape and up to 256 of its examples."""
    x, y = task.train
    some = torch.linspace(0, len(x) - 1, min(len(x), 256)).long().to(x.device)
    digest = hashlib.sha256(f"{tuple(x.shape)} {x.dtype}".encode())
    for part in (x[some], y[some]):
        digest.update(part.cpu().double().numpy().tobytes())
    return digest.hexdigest()


def describe(part: Any) -> Any:
    """A JSON-able description that is the same in every process."""
    if is_dataclass(part) and not isinstance(part, type):
        values = {field.name: describe(getattr(part, field.name)) for field in fields(part)}
        return {"class": type(part).__name__, **values}
    if isinstance(part, float) and math.isinf(part):
        return str(part)
    if isinstance(part, tuple | list):
        return [describe(value) for value in part]
    if isinstance(part, Tensor):
        return part.tolist()
    if callable(part):
        return _function_name(part)
    if part is None or isinstance(part, str | int | float):
        return part
    return type(part).__qualname__


def _function_name(function: Any) -> str:
    """Its name; a lambda, which has none, is told apart by its code."""
    name: str = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(function, "__code__", None)
    if "<" not in name or code is None:
        return name
    plain = [c for c in code.co_consts if isinstance(c, str | int | float | tuple)]
    return f"{name} {hashlib.sha256(code.co_code + repr(plain).encode()).hexdigest()[:12]}"


def _client_rows(clients: Sequence[Any], task: Task) -> list[Tensor]:
    """The rows as whole numbers, each client checked."""
    x, _ = task.train
    if isinstance(clients, str | Mapping) or not isinstance(clients, Iterable):
        raise SettingError("clients", clients, "must be a list with the rows of each client")
    found = []
    for client, given in enumerate(clients):
        try:
            rows = torch.as_tensor(sorted(given) if isinstance(given, set) else given)
        except (TypeError, ValueError, RuntimeError) as error:
            raise SettingError(
                f"clients[{client}]", given, "must be a list of row numbers"
            ) from error
        if rows.numel() == 0:
            raise SettingError(f"clients[{client}]", [], "must hold at least one row")
        if rows.dim() != 1 or rows.is_floating_point() or rows.dtype == torch.bool:
            raise SettingError(f"clients[{client}]", given, "must be a list of row numbers")
        if int(rows.min()) < 0 or int(rows.max()) >= len(x):
            raise SettingError(
                f"clients[{client}]",
                f"rows from {int(rows.min())} to {int(rows.max())}",
                f"must lie from 0 to {len(x) - 1}, since there are {len(x)} training examples",
            )
        found.append(rows.to(device="cpu", dtype=torch.int64))
    if not found:
        raise SettingError("clients", [], "must be a list with the rows of each client")
    return found
