"""What the clients of a round have to do, and what comes back: the same for every executor."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, overload

import torch
from torch import Tensor

from ..plan import Plan
from ..tasks.images import Batch
from ..trees import Tree

OnClient = Callable[[int, int], None]
"""Told how many clients of the cohort are done."""


@dataclass(frozen=True)
class Assignment:
    """One client's work in a round, on the CPU."""

    client: int
    rows: Tensor
    """All that it holds."""
    order: Tensor
    """The rows of all local steps, one after another."""
    sizes: tuple[int, ...]
    """The rows of each step."""
    draws: Tensor | None
    """How each row of `order` is augmented."""
    keys: Tensor
    """Of each step."""
    weight: float
    """In the mean over the cohort."""

    def batches(self) -> list[Batch]:
        """One for each step."""
        sizes = list(self.sizes)
        rows = torch.split(self.order, sizes)
        draws = [None] * len(sizes) if self.draws is None else torch.split(self.draws, sizes)
        return [Batch(*each) for each in zip(rows, draws, self.keys.unbind(), strict=True)]


class Alike(Sequence[Assignment]):
    """The work of clients that all have equally many rows and the same steps, kind by kind: a round
    of small models is over before Python has made an object for each."""

    def __init__(
        self,
        clients: list[int],
        weights: list[float],
        sizes: tuple[int, ...],
        rows: Tensor,
        order: Tensor,
        keys: Tensor,
        draws: Tensor | None,
    ) -> None:
        """The tensors' first axis is the clients."""
        self.clients, self.weights, self.sizes = clients, weights, sizes
        self.rows, self.order, self.keys, self.draws = rows, order, keys, draws

    @cached_property
    def _each(self) -> list[Assignment]:
        draws = [None] * len(self) if self.draws is None else self.draws.unbind()
        parts = self.clients, self.rows, self.order, draws, self.keys, self.weights
        return [
            Assignment(client, rows, order, self.sizes, drawn, keys, weight)
            for client, rows, order, drawn, keys, weight in zip(*parts, strict=True)
        ]

    def __len__(self) -> int:
        return len(self.clients)

    @overload
    def __getitem__(self, index: int) -> Assignment: ...
    @overload
    def __getitem__(self, index: slice) -> list[Assignment]: ...
    def __getitem__(self, index: int | slice) -> Assignment | list[Assignment]:
        return self._each[index]


def clients_of(work: Sequence[Assignment]) -> list[int]:
    """Whose work it is."""
    return work.clients if isinstance(work, Alike) else [each.client for each in work]


def weights_of(work: Sequence[Assignment]) -> list[float]:
    """Each client's, in the mean over the cohort."""
    return work.weights if isinstance(work, Alike) else [each.weight for each in work]


class Upload(NamedTuple):
    """What one client sends, and the mean over the cohort: only ever averaged."""

    report: Any
    buffers: Tree
    """The change of the floating buffers."""
    loss: Tree


class Collected(NamedTuple):
    """A finished round of the cohort: everything that the server and the store need."""

    report: Any
    buffers: Tree
    loss: Tensor
    states: Mapping[int, Any]
    """For `ClientStore.commit`."""


class Executor(Protocol):
    """Runs a cohort; changes nothing but what it returns."""

    def run(self, round: int, sent: Any, buffers: Tree, on_client: OnClient) -> Collected:
        """One round of the plan's cohort."""
        ...

    def prepare(self, round: int) -> None:
        """What can be done for this round before its broadcast is known."""
        ...


def assignments(plan: Plan, round: int, augments: bool, weighting: str) -> list[Assignment]:
    """The work of the round's cohort."""
    found = []
    for client in plan.cohort(round):
        rows = plan.rows(round, client)
        (order, keys), sizes = plan.steps(round, client), plan.sizes(len(rows))
        draws = plan.draws(round, client, len(order)) if augments else None
        weight = float(len(rows)) if weighting == "examples" else 1.0
        found.append(Assignment(client, rows, order, sizes, draws, keys, weight))
    return found


def average_buffers(before: Tree, mean_change: Tree, largest: Tree) -> Tree:
    """The global buffers after a round: floating ones averaged, counters the largest."""
    return {
        name: b + mean_change[name] if name in mean_change else largest[name]
        for name, b in before.items()
    }
