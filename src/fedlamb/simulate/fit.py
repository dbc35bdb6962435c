"""`fit`: a federation as an iterator of rounds."""

import hashlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..algorithm import AnyAlgorithm
from ..checkpoint import load_checkpoint, save_checkpoint
from ..errors import SettingError
from ..plan import Plan
from ..tasks.task import Task
from ..trees import Tree
from ..wire import RecordError, downlink_bytes, kept_versions, nbytes, pack, unpack, uplink_bytes
from .client_store import ClientStore
from .loop import Loop

Weighting = Literal["uniform", "examples"]


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
    clients: Sequence[Any],
    rounds: int,
    fraction: float = 1.0,
    batch_size: int = 128,
    epochs: int = 1,
    weighting: Weighting = "uniform",
    seed: int = 0,
) -> "Run":
    """A federation that trains `task` by `algorithm`; iterate over it to run its rounds.

    clients: the rows of the training data that each client holds.
    rounds: how many rounds the iterator runs.
    fraction: the share of clients in each round; max(1, floor(fraction * n)) of them.
    batch_size, epochs: local minibatches (the last may be smaller) and passes over the rows.
    weighting: the mean over clients, "uniform" or by number of "examples".
    seed: decides cohorts, batches and random layers. Same seed, same bits.
    """
    for name, value in (("rounds", rounds), ("batch_size", batch_size), ("epochs", epochs)):
        if type(value) is not int or value < 1:
            raise SettingError(name, value, "must be a whole number from 1 on")
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
        raise SettingError("fraction", fraction, "must be above 0 and at most 1, for example 0.5")
    if weighting not in ("uniform", "examples"):
        raise SettingError("weighting", weighting, "must be 'uniform' or 'examples'")
    if type(seed) is not int or seed < 0:
        raise SettingError("seed", seed, "must be a whole number from 0 on")
    for function in ("server_init", "client_step", "server_update"):
        if isinstance(algorithm, type) or not callable(getattr(algorithm, function, None)):
            raise SettingError(
                "algorithm", algorithm, "must be an algorithm such as fedlamb.FedLAMB(lr=0.01)"
            )
    rows = _client_rows(clients, task)
    plan = Plan(rows, fraction=fraction, batch_size=batch_size, epochs=epochs, seed=seed)
    return Run(algorithm, task, plan, weighting, rounds)


class Run(Iterator[Round]):
    """A federation under way: `for r in run` runs its rounds, one by one.

    `params` and `buffers` are the global model now, `model()` is a module that holds them,
    `number` the rounds done. `save` and `restore` carry a run across processes, bit for bit.
    """

    def __init__(
        self, algorithm: AnyAlgorithm, task: Task, plan: Plan, weighting: Weighting, rounds: int
    ) -> None:
        self.algorithm, self.task, self.plan = algorithm, task, plan
        self.weighting, self.rounds = weighting, rounds
        self.number = 0
        self.server = algorithm.server_init(task.params)
        self.buffers = task.buffers
        self.store = ClientStore(lambda: algorithm.client_init(task.params))
        self._executor = Loop(algorithm, task, plan, weighting, self.store)

    @property
    def params(self) -> Tree:
        """The global model's parameters."""
        params: Tree = self.server.params
        return params

    @property
    def diverged(self) -> bool:
        """Whether the global model holds a number that is not finite; no round can mend that."""
        return not all(bool(torch.isfinite(p).all()) for p in self.params.values())

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
        number = self.number + 1
        with torch.no_grad():
            sent = self.algorithm.broadcast(self.server)
            collected = self._executor.run(number, sent, self.buffers)
            server = self.algorithm.server_update(self.server, collected.report)
        metrics = {
            "train_loss": collected.loss,
            **self.task.evaluate(server.params, collected.buffers),
        }
        cohort = list(collected.states)
        beside = nbytes(self.buffers)
        up = len(cohort) * (uplink_bytes(collected.report) + beside)
        down = sum(downlink_bytes(sent, self.store.versions(c)) + beside for c in cohort)
        self.server, self.buffers, self.number = server, collected.buffers, number
        self.store.commit(collected.states, kept_versions(sent))
        return Round(number, cohort, metrics, up, down, time.perf_counter() - start)

    def save(self, path: str | Path) -> None:
        """Writes everything that the next round depends on."""
        tensors = {f"server/{name}": t for name, t in pack(self.server).items()}
        tensors |= {f"buffers/{name}": t for name, t in self.buffers.items()}
        for client, state in self.store.states.items():
            tensors |= {f"client/{client}/{name}": t for name, t in pack(state).items()}
        held = {str(client): versions for client, versions in self.store.held.items()}
        facts = {"number": self.number, "run": self._identity(), "held": held}
        save_checkpoint(Path(path), tensors, facts)

    def restore(self, path: str | Path) -> None:
        """Takes the state that `save` wrote for a run with the same settings."""
        tensors, facts = load_checkpoint(Path(path))
        identity = self._identity()
        for key, mine in identity.items():
            if facts["run"].get(key) != mine:
                raise SettingError(
                    "checkpoint",
                    str(path),
                    f"was made with {key} = {facts['run'].get(key)!r}, "
                    f"and this run has {mine!r}; use the settings that it was made with",
                )
        parts: dict[str, dict[str, Tensor]] = {}
        states: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            part, _, rest = name.partition("/")
            if part == "client":
                client, _, rest = rest.partition("/")
                states.setdefault(int(client), {})[rest] = tensor
            else:
                parts.setdefault(part, {})[rest] = tensor
        like = self.algorithm.client_init(self.task.params)
        try:
            server = unpack(parts["server"], like=self.server)
            found = {client: unpack(state, like) for client, state in states.items()}
        except (KeyError, RecordError) as error:
            raise SettingError(
                "checkpoint", str(path), f"does not fit the model; {error}"
            ) from error
        self.server, self.number = server, facts["number"]
        device = next(iter(self.params.values())).device
        self.buffers = {n: parts["buffers"][n].to(device) for n in self.task.buffers}
        held = {int(client): versions for client, versions in facts["held"].items()}
        self.store.replace(found, held)

    def _identity(self) -> dict[str, Any]:
        """What must be the same for a resumed run to be the same run."""
        digest = hashlib.sha256()
        for rows in self.plan.clients:
            digest.update(len(rows).to_bytes(8, "little") + rows.cpu().numpy().tobytes())
        return {
            "algorithm": describe(self.algorithm),
            "seed": self.plan.seed,
            "fraction": self.plan.fraction,
            "batch_size": self.plan.batch_size,
            "epochs": self.plan.epochs,
            "weighting": self.weighting,
            "clients": digest.hexdigest(),
        }


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
        return getattr(part, "__qualname__", type(part).__qualname__)
    return part


def _client_rows(clients: Sequence[Any], task: Task) -> list[Tensor]:
    """The rows as whole numbers on the data's device, each client checked."""
    x, _ = task.train
    if isinstance(clients, str | int) or len(clients) == 0:
        raise SettingError("clients", clients, "must be a list with the rows of each client")
    found = []
    for client, given in enumerate(clients):
        rows = torch.as_tensor(given)
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
        found.append(rows.to(device=x.device, dtype=torch.int64))
    return found
