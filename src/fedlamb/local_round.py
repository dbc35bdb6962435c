"""THE client round: the one place where it is written down.

Executors differ in how they map these functions over clients and in how they take gradients.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .algorithm import AnyAlgorithm
from .tasks.images import Batch
from .trees import Tree


class Gradients(Protocol):
    """How an executor takes gradients of the training loss."""

    def minibatch(self, params: Tree, buffers: Tree, batch: Batch) -> tuple[Tree, Tree, Tensor]:
        """In training mode: mean gradient over the batch, buffers afterwards, loss."""
        ...

    def full(self, params: Tree, buffers: Tree, data: Batch) -> Tree:
        """In evaluation mode: exact mean gradient over the rows; buffers are not updated."""
        ...


class Underway(NamedTuple):
    """A client in the middle of its round."""

    local: Any
    buffers: Tree
    """They travel beside the parameters: only the next step of the same client sees them."""
    loss: Tensor
    """The sum over the steps so far, each before its update."""


Steps = Callable[[Gradients, Underway, Any, Sequence[Batch]], Underway]


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
    data: Batch,
    batches: Sequence[Batch],
    steps: Steps | None = None,
) -> Outcome:
    """One client's round: begin, a step for each batch, end. `data` are all of its rows.

    steps: what takes the steps, where it is not `step`, one after another.
    """
    now = begin(algorithm, gradients, client, sent, buffers, data)
    if steps is not None:
        now = steps(gradients, now, sent, batches)
    else:
        for batch in batches:
            now = step(algorithm, gradients, now, sent, batch)
    return end(algorithm, now, sent, len(batches))


def begin(
    algorithm: AnyAlgorithm,
    gradients: Gradients,
    client: Any,
    sent: Any,
    buffers: Tree,
    data: Batch,
) -> Underway:
    """The client has received the broadcast."""
    local = algorithm.client_begin(client, sent, lambda x: gradients.full(x, buffers, data))
    return Underway(local, buffers, next(iter(sent.params.values())).new_zeros(()))


def step(
    algorithm: AnyAlgorithm, gradients: Gradients, now: Underway, sent: Any, batch: Batch
) -> Underway:
    """One local step."""
    buffers, loss = now.buffers, now.loss

    def grad_at(x: Tree) -> Tree:
        nonlocal buffers, loss
        gradient, buffers, value = gradients.minibatch(x, buffers, batch)
        loss = now.loss + value.detach()
        return gradient

    local = algorithm.client_step(now.local, sent, grad_at)
    return Underway(local, buffers, loss)


def end(algorithm: AnyAlgorithm, now: Underway, sent: Any, steps: Tensor | int) -> Outcome:
    """The client reports; `steps` is how many it took."""
    client, report = algorithm.client_end(now.local, sent)
    return Outcome(client, report, now.buffers, now.loss / torch.as_tensor(steps))
