"""Gradients by `torch.func`, for the vectorised executor and for compiled programs."""

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any, Self

from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from ..tasks.dropout import keyed_layers
from ..tasks.images import Batch
from ..tasks.task import CHUNK, Task
from ..trees import Tree, add_scaled, zeros_like


class Functional:
    """Gradients by `torch.func`, for use under vmap."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        self.task, self.model, self.data = task, model, task.train
        self._keyed = keyed_layers(model)
        kept = {*task.params, *task.buffers, *self._keyed}
        # Buffers that are no part of the state, and frozen parameters, stay as the model has them.
        self._rest = {n: b for n, b in model.named_buffers() if n not in kept}
        self._after: Tree = {}
        """The buffers as the last forward pass left them."""
        if task.buffers:
            model.register_forward_hook(partial(_note_buffers, self._after))

    @property
    def keyed(self) -> bool:
        """Whether random layers take a batch's key."""
        return bool(self._keyed)

    def reading(self, inputs: Tensor, targets: Tensor) -> Self:
        """The same for other data of the same kind."""
        other = copy.copy(self)
        other.data = inputs, targets
        return other

    def minibatch(self, params: Tree, buffers: Tree, batch: Batch) -> tuple[Tree, Tree, Tensor]:
        self.model.train()
        keys = dict.fromkeys(self._keyed, batch.key)
        for layer in self._keyed.values():
            layer.calls = 0
        gradient, after, loss = self._gradient(params, {**self._rest, **buffers}, keys, batch)
        return gradient, {name: after[name] for name in buffers}, loss

    def full(self, params: Tree, buffers: Tree, data: Batch) -> Tree:
        self.model.eval()
        total = zeros_like(params)
        count = len(data.rows)
        for start in range(0, count, CHUNK):
            rows = data.rows[start : start + CHUNK]
            if data.weights is None:
                gradient, _, _ = self._gradient(params, buffers, {}, Batch(rows))
                total = add_scaled(total, len(rows) / count, gradient)
            else:
                part = Batch(rows, weights=data.weights[start : start + CHUNK])
                gradient, _, _ = self._gradient(params, buffers, {}, part)
                total = add_scaled(total, 1.0, gradient)
        return total

    def picked(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The inputs and targets of the batch's rows."""
        x, y = (part[batch.rows] for part in self.data)
        return x, y

    def _gradient(
        self, params: Tree, buffers: Tree, keys: Mapping[str, Any], batch: Batch
    ) -> tuple[Tree, Tree, Tensor]:
        task = self.task
        x, y = self.picked(batch)

        def loss(trained: Tree) -> tuple[Tensor, Tree]:
            now = {name: b.clone() for name, b in buffers.items()}  # the model changes them
            state = {**now, **keys, **trained}
            outputs = task.outputs(
                lambda inputs: functional_call(self.model, state, (inputs,)), x, batch.draws
            )
            # A model may write on a buffer, or put a new one in its place.
            now = {name: self._after[name].detach() for name in buffers}
            self._after.clear()
            if batch.weights is None:
                return task.loss(outputs, y), now
            of_each = vmap(lambda o, t: task.loss(o[None], t[None]), randomness="different")
            return (of_each(outputs, y) * batch.weights).sum(), now

        gradient, (value, after) = grad_and_value(loss, has_aux=True)(params)
        return gradient, after, value


def _note_buffers(after: Tree, model: nn.Module, *passed: Any) -> None:
    after.update(model.named_buffers(remove_duplicate=False))


class OfPicked(Functional):
    """Gradients on data that are the batch themselves."""

    def picked(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.data

    def full_of_picked(self, params: Tree, buffers: Tree) -> Tree:
        """The mean over all of these data."""
        return self.full(params, buffers, Batch(self.data[1]))
