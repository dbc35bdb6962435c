"""THE client round: the one place where it is written down.

Executors differ in how they map this function over clients and in how they take gradients.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .algorithm import AnyAlgorithm
from .tasks.images import Batch
from .trees import Tree


class Gradients(Protocol):
    """How an executor takes gradients; `rows` are rows of the training data."""

    def minibatch(self, params: Tree, buffers: Tree, batch: Batch) -> tuple[Tree, Tree, Tensor]:
        """In training mode: mean gradient over the batch, buffers afterwards, loss."""
        ...

    def full(self, params: Tree, buffers: Tree, rows: Tensor) -> Tree:
        """In evaluation mode: exact mean gradient over the rows; buffers are not updated."""
        ...


class Outcome(NamedTuple):
    """What a client's round leaves behind."""

    client: Any
    report: Any
    buffers: Tree
    loss: Tensor
    """Mean training loss over the local steps, each before its update."""


def local_round(
    algorithm: AnyAlgorithm,
    gradients: Gradients,
    client: Any,
    sent: Any,
    buffers: Tree,
    rows: Tensor,
    batches: Sequence[Batch],
) -> Outcome:
    """One client's round: begin, a step for each batch, end."""
    losses: list[Tensor] = []
    local = algorithm.client_begin(client, sent, lambda x: gradients.full(x, buffers, rows))
    # Buffers travel beside the parameters: only the next step of the same client sees them.
    now = buffers
    for batch in batches:

        def grad_at(x: Tree, batch: Batch = batch) -> Tree:
            nonlocal now
            gradient, now, loss = gradients.minibatch(x, now, batch)
            losses.append(loss)
            return gradient

        local = algorithm.client_step(local, sent, grad_at)
    client, report = algorithm.client_end(local, sent)
    return Outcome(client, report, now, torch.stack(losses).mean())
