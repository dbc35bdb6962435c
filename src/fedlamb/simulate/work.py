"""What the clients of a round have to do, and what comes back: the same for every executor."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..plan import Plan
from ..tasks.images import Batch
from ..trees import Tree

OnClient = Callable[[int, int], None]
"""Told how many clients of the cohort are done."""


class Assignment(NamedTuple):
    """One client's work in a round, on the CPU."""

    client: int
    data: Batch
    """All of its rows."""
    batches: list[Batch]
    model_seed: int
    weight: float
    """In the mean over the cohort."""


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
    states: Any
    """For `ClientStore.commit`."""


class Executor(Protocol):
    """Runs a cohort; changes nothing but what it returns."""

    def run(self, round: int, sent: Any, buffers: Tree, on_client: OnClient) -> Collected:
        """One round of the plan's cohort."""
        ...


def assignments(plan: Plan, round: int, augments: bool, weighting: str) -> list[Assignment]:
    """The work of the round's cohort."""
    found = []
    for client in plan.cohort(round):
        rows = plan.rows(round, client)
        steps = plan.batches(round, client)
        sizes = [len(step) for step in steps]
        draws: list[Tensor | None] = [None] * len(steps)
        if augments:
            draws = list(torch.split(plan.draws(round, client, sum(sizes)), sizes))
        keys = plan.keys(round, client, len(steps)).unbind()
        batches = [Batch(*each) for each in zip(steps, draws, keys, strict=True)]
        weight = float(len(rows)) if weighting == "examples" else 1.0
        seed = plan.model_seed(round, client)
        found.append(Assignment(client, Batch(rows), batches, seed, weight))
    return found


def average_buffers(before: Tree, mean_change: Tree, largest: Tree) -> Tree:
    """The global buffers after a round: floating ones averaged, counters the largest."""
    return {
        name: b + mean_change[name] if name in mean_change else largest[name]
        for name, b in before.items()
    }
