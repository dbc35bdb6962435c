"""What a federated algorithm is: hyper-parameters and seven pure functions.

    server state ─broadcast─► sent ─► client_begin, T × client_step, client_end ─► report
         ▲                                                                            │
         └───────────── server_update(server state, mean of the reports) ◄────────────┘

An algorithm knows no client axis, draws no random numbers, and changes none of its inputs.
Its states and messages are NamedTuples of trees (and of plain numbers at the server), so they
can be averaged, batched, sent and stored without knowing which algorithm they belong to.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from numbers import Integral, Real
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from .errors import SettingError, is_whole
from .trees import Tree

GradAt = Callable[[Tree], Tree]
"""The gradient of the loss at a point; the data are already bound."""


class Kept(NamedTuple):
    """A tree in a broadcast that clients keep: it is sent again only when its version changed.

    Version 0 is what `server_init` makes; every client can make it too, so it is never sent.
    """

    version: int
    tree: Tree


class HasParams(Protocol):
    """Every server state holds the global model as `params`."""

    @property
    def params(self) -> Tree: ...


S = TypeVar("S", bound=HasParams)  # server state
B = TypeVar("B")  # broadcast
C = TypeVar("C")  # client state, survives rounds
L = TypeVar("L")  # local state, dies with the round
R = TypeVar("R")  # report: trees only, and only ever averaged


class Algorithm(Protocol[S, B, C, L, R]):
    """The seven functions; each is pure."""

    def server_init(self, params: Tree) -> S:
        """The server's state before round 1."""
        ...

    def broadcast(self, server: S) -> B:
        """What every sampled client is sent, the same for all."""
        ...

    def client_init(self, params: Tree) -> C:
        """The state of a client that has never taken part."""
        ...

    def client_begin(self, client: C, sent: B, full_grad_at: GradAt) -> L:
        """Opens a local round; `full_grad_at` is the exact mean over all local data."""
        ...

    def client_step(self, local: L, sent: B, grad_at: GradAt) -> L:
        """One local step; `grad_at` is the mean gradient over this step's minibatch."""
        ...

    def client_end(self, local: L, sent: B) -> tuple[C, R]:
        """Closes the local round: what the client keeps, and what it reports."""
        ...

    def server_update(self, server: S, mean: R) -> S:
        """The server's next state from the mean of the reports."""
        ...


AnyAlgorithm = Algorithm[Any, Any, Any, Any, Any]


def is_sync(round: int, sync_every: int) -> bool:
    """Whether second moments are synchronised in this round: rounds 1, 1 + Z, 1 + 2Z, ..."""
    return (round - 1) % sync_every == 0


def check_hyperparameters(algorithm: object) -> None:
    """Checks each field that has a rule below; a tensor is taken as it is (a sweep's axis)."""
    for field in fields(algorithm):  # type: ignore[arg-type]
        value = getattr(algorithm, field.name)
        if field.name in _RULES and not isinstance(value, Tensor):
            holds, right = _RULES[field.name]
            if not holds(value):
                raise SettingError(field.name, value, f"must be {right}")
            if _number(value):  # a NumPy scalar becomes a plain number
                plain = int(value) if isinstance(value, Integral) else float(value)
                object.__setattr__(algorithm, field.name, plain)
    low, high = getattr(algorithm, "phi_min", 0.0), getattr(algorithm, "phi_max", math.inf)
    if not isinstance(low, Tensor) and not isinstance(high, Tensor) and low > high:
        raise SettingError("phi_min", low, f"must not be above phi_max, which is {high}")


def _number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _positive(value: Any) -> bool:
    return _number(value) and 0 < value < math.inf


def _share(value: Any) -> bool:
    return _number(value) and 0 <= value < 1


def _factors(schedule: Any) -> bool:
    first: Any = schedule(1) if callable(schedule) else None
    return isinstance(first, Tensor) or (_number(first) and 0 <= first < math.inf)


_Rule = tuple[Callable[[Any], bool], str]
_RULES: Mapping[str, _Rule] = {
    "lr": (_positive, "a positive number, for example 0.01"),
    "server_lr": (_positive, "a positive number, for example 0.01"),
    "beta1": (_share, "a number from 0 up to, but not including, 1; the paper has 0.9"),
    "beta2": (_share, "a number from 0 up to, but not including, 1; the paper has 0.999"),
    "eps": (_positive, "a positive number, for example 1e-8"),
    "weight_decay": (
        lambda v: _number(v) and 0 <= v < math.inf,
        "a number from 0 on; the paper tries 0, 0.01 and 0.1",
    ),
    "first_round": (lambda v: v in ("local", "vhat"), "'local' or 'vhat'"),
    "momentum": (lambda v: v in ("persist", "reset"), "'persist' or 'reset'"),
    "layers": (
        lambda v: v in ("tensor", "module") or callable(v),
        "'tensor', 'module' or a function from parameter name to layer",
    ),
    "phi_min": (lambda v: _number(v) and 0 <= v < math.inf, "a number from 0 on"),
    "phi_max": (lambda v: _number(v) and v > 0, "a positive number, or inf"),
    "sync_every": (lambda v: is_whole(v) and v >= 1, "a whole number of rounds from 1 on"),
    "schedule": (
        _factors,
        "a function from round number to factor, from 0 on, such as StepDecay((30, 70))",
    ),
}
