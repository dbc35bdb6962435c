"""A run on disk: one file, or a journal that writes only what a round changed."""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..checkpoint import load_checkpoint, save_checkpoint
from ..errors import SettingError
from ..files import remove_leftovers
from ..tasks.partition import PerRound
from ..tasks.task import Task
from ..trees import Tree
from ..wire import Record, RecordError, pack, unpack

if TYPE_CHECKING:
    from .fit import Run


def save(run: "Run", path: Path) -> None:
    """Writes everything that the next round depends on into one file."""
    states = run.crew.gathered(run.store.all(), run.store.fresh(), run.task.device)
    if run.crew.leads:
        tensors, facts = _globals(run)
        save_checkpoint(path, {**tensors, **_clients(states)}, facts)


def restore(run: "Run", path: Path) -> None:
    """Takes what `save` wrote for a run with the same settings."""
    tensors, facts = load_checkpoint(path)
    mine = {n: t for n, t in tensors.items() if not n.startswith("client/")}
    states = _by_client({n: t for n, t in tensors.items() if n.startswith("client/")})
    _take(run, path, mine, facts, states)


class Journal:
    """A run's folder: the server in one file, and a file for each round's clients.

    The server's file names, for each client, the round whose file holds its state. It is written
    last, so that a crash at any moment leaves the files that the one before names.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "checkpoint.safetensors"
        self._clients = folder / "clients"
        self._round_of: dict[int, int] = {}
        self._unwritten: dict[int, Any] = {}

    def exists(self) -> bool:
        """Whether a round was ever written."""
        return self.path.exists()

    def note(self, run: "Run") -> None:
        """Remembers what the last round changed, for the next `write`."""
        self._unwritten |= run.changed

    def write(self, run: "Run") -> None:
        """Writes what was noted since the last time; all processes of a crew call this."""
        states = run.crew.gathered(self._unwritten, run.store.fresh(), run.task.device)
        if run.crew.leads:
            self._write(run, states)
        self._unwritten = {}  # only now: what could not be written is tried again

    def _write(self, run: "Run", states: Mapping[int, Any]) -> None:
        stored = _clients(states)
        if stored:
            self._clients.mkdir(exist_ok=True)
            save_checkpoint(self._file(run.number), stored, {})
            self._round_of |= dict.fromkeys(states, run.number)
        tensors, facts = _globals(run)
        save_checkpoint(self.path, tensors, {**facts, "round_of": _keyed(self._round_of)})
        self._remove_others()

    def read(self, run: "Run") -> None:
        """Takes the last round that was written whole."""
        remove_leftovers(self.path)
        tensors, facts = load_checkpoint(self.path)
        self._round_of = {int(c): r for c, r in facts["round_of"].items()}
        states: dict[int, Record] = {}
        for number in sorted(set(self._round_of.values())):
            found = _by_client(load_checkpoint(self._file(number))[0])
            states |= {c: s for c, s in found.items() if self._round_of.get(c) == number}
        _take(run, self.path, tensors, facts, states)
        self._remove_others()

    def _file(self, number: int) -> Path:
        return self._clients / f"{number:06}.safetensors"

    def _remove_others(self) -> None:
        if self._clients.is_dir():
            named = {self._file(number) for number in set(self._round_of.values())}
            for path in self._clients.iterdir():
                if path not in named:
                    path.unlink(missing_ok=True)


def _globals(run: "Run") -> tuple[Record, dict[str, Any]]:
    facts = {"number": run.number, "run": identity(run), "held": _keyed(run.store.held)}
    return pack(_Global(run.server, run.buffers)), facts


def _clients(states: Mapping[int, Any]) -> Record:
    return {
        f"client/{client}/{name}": tensor
        for client, state in states.items()
        for name, tensor in pack(state).items()
    }


def _by_client(tensors: Record) -> dict[int, Record]:
    found: dict[int, Record] = {}
    for name, tensor in tensors.items():
        _, client, rest = name.split("/", 2)
        found.setdefault(int(client), {})[rest] = tensor
    return found


def _keyed(table: Mapping[int, Any]) -> dict[str, Any]:
    return {str(key): value for key, value in table.items()}


def _take(
    run: "Run", path: Path, tensors: Record, facts: dict[str, Any], states: dict[int, Record]
) -> None:
    own, late = identity(run), ("model", "loss", "inputs", "precision")  # shapes say more
    _check_same(path, facts["run"], {k: v for k, v in own.items() if k not in late})
    like = run.store.fresh()
    try:
        server, buffers = unpack(tensors, like=_Global(run.server, run.task.buffers))
        found = {c: unpack(state, like) for c, state in states.items() if run.crew.owns(c)}
        if set(buffers) != set(run.task.buffers):
            raise RecordError("the model's buffers are missing")
    except RecordError as error:
        raise SettingError("checkpoint", str(path), f"does not fit the model; {error}") from error
    _check_same(path, facts["run"], {k: own[k] for k in late if k in facts["run"]})
    run.server, run.buffers, run.number = server, buffers, facts["number"]
    run.store.replace(found, {int(client): v for client, v in facts["held"].items()})


def _check_same(path: Path, theirs: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    for key, mine in own.items():
        if theirs.get(key) != mine:
            raise SettingError(
                "checkpoint",
                str(path),
                f"was made with {key} = {theirs.get(key)!r}, "
                f"and this run has {mine!r}; use the settings that it was made with",
            )


def identity(run: "Run") -> dict[str, Any]:
    """What must be the same for a resumed run to be the same run."""
    if run.known_as is None:
        run.known_as = _identity(run)
    return run.known_as


def _identity(run: "Run") -> dict[str, Any]:
    plan = run.plan
    algorithm = describe(run.algorithm)
    if isinstance(algorithm, dict):
        algorithm = {f"algorithm.{key}": value for key, value in algorithm.items()}
    else:
        algorithm = {"algorithm": algorithm}
    digest = hashlib.sha256()
    if isinstance(plan.clients, PerRound):
        for client in plan.cohort(1):
            rows = plan.rows(1, client)
            digest.update(len(rows).to_bytes(8, "little") + rows.numpy().tobytes())
    else:
        for part in (plan.clients.sizes, plan.clients.flat):
            digest.update(part.numpy().tobytes())
    return {
        **algorithm,
        "seed": plan.seed,
        "fraction": plan.fraction,
        "batch_size": plan.batch_size,
        "epochs": plan.epochs,
        "weighting": run.weighting,
        "clients": digest.hexdigest(),
        "data": _sample_digest(run.task),
        "model": _model_name(run.task),
        "loss": describe(run.task.loss),
        "inputs": describe(run.task.inputs),
        "precision": run.task.precision,
    }


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


def _model_name(task: Task) -> str:
    """Its class, told apart by what it prints of its layers; places in memory do not count."""
    layers = re.sub("0x[0-9a-f]+", "", repr(task.model))
    return f"{type(task.model).__name__} {_short(layers.encode())}"


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
    return f"{name} {_short(code.co_code + repr(plain).encode())}"


def _short(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:12]
