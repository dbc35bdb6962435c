"""The loop executor: clients one after another, any model, memory of one client."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..algorithm import AnyAlgorithm
from ..local_round import Outcome, local_round
from ..plan import Plan
from ..randomness import own_random_state
from ..tasks.images import Batch
from ..tasks.task import CHUNK, Task
from ..trees import Tree, add, add_scaled, tree_map, zeros_like
from .allocator import keep_freed_memory
from .client_store import ClientStore
from .running_mean import RunningMean


class Assignment(NamedTuple):
    """One client's work in a round."""

    client: int
    rows: Tensor
    batches: list[Batch]
    model_seed: int


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
    loss: float
    states: dict[int, Any]


class Loop:
    """Runs a cohort client by client, with plain autograd on one copy of the model."""

    def __init__(
        self, algorithm: AnyAlgorithm, task: Task, plan: Plan, weighting: str, store: ClientStore
    ) -> None:
        keep_freed_memory()
        self.algorithm, self.plan, self.store = algorithm, plan, store
        self.weighting = weighting
        self.gradients = Autograd(task)
        self._device, self._augments = task.train[0].device, task.augments

    def run(
        self,
        round: int,
        sent: Any,
        buffers: Tree,
        on_client: Callable[[int, int], None] = lambda done, cohort: None,
    ) -> Collected:
        """One round of the plan's cohort; changes nothing but what it returns."""
        averaged = {name: b for name, b in buffers.items() if b.is_floating_point()}
        counters = {name: b for name, b in buffers.items() if name not in averaged}
        mean = RunningMean()
        states: dict[int, Any] = {}
        # The whole cohort is planned first: between two clients the same takes several times
        # as long, since by then the caches hold nothing but models and data.
        work = [self._assignment(round, client) for client in self.plan.cohort(round)]
        with torch.enable_grad(), own_random_state(self._device) as generator:
            for each in work:
                try:
                    generator.manual_seed(each.model_seed)
                    outcome = self._local_round(each, sent, buffers)
                except Exception as error:
                    error.add_note(f"in the local round of client {each.client}, round {round}")
                    raise
                states[each.client] = outcome.client
                on_client(len(states), len(work))
                change = tree_map(torch.sub, {n: outcome.buffers[n] for n in averaged}, averaged)
                upload = Upload(outcome.report, change, {"loss": outcome.loss})
                mean.add(upload, len(each.rows) if self.weighting == "examples" else 1)
                counters = {n: torch.maximum(c, outcome.buffers[n]) for n, c in counters.items()}
        moved = {**add(averaged, mean.value.buffers), **counters}
        buffers = {name: moved[name] for name in buffers}
        return Collected(mean.value.report, buffers, float(mean.value.loss["loss"]), states)

    def _assignment(self, round: int, client: int) -> Assignment:
        plan, device = self.plan, self._device
        rows = [part.to(device) for part in plan.batches(round, client)]
        draws: Sequence[Tensor | None] = [None] * len(rows)
        if self._augments:
            sizes = [len(part) for part in rows]
            draws = torch.split(plan.draws(round, client, sum(sizes)).to(device), sizes)
        return Assignment(
            client,
            plan.rows(round, client).to(device),
            [Batch(*both) for both in zip(rows, draws, strict=True)],
            plan.model_seed(round, client),
        )

    def _local_round(self, each: Assignment, sent: Any, buffers: Tree) -> Outcome:
        state = self.store.state(each.client)
        return local_round(
            self.algorithm, self.gradients, state, sent, buffers, each.rows, each.batches
        )


class Autograd:
    """Gradients by plain autograd on one private copy of the model.

    Parameters are put into the model by reference, buffers by a copy, since training mode
    changes them in place. Buffers that are not part of the state start afresh each time.
    """

    def __init__(self, task: Task) -> None:
        self.task, self.model = task, copy.deepcopy(task.model)
        self.x, self.y = task.train
        self._parameters = dict(self.model.named_parameters())
        self._trained = [self._parameters[name] for name in task.params]
        found = {name: b.clone() for name, b in self.model.named_buffers()}
        self._owners = {name: _owner(self.model, name) for name in found}
        self._afresh = {name: b for name, b in found.items() if name not in task.buffers}
        self._training: bool | None = None

    def minibatch(self, params: Tree, buffers: Tree, batch: Batch) -> tuple[Tree, Tree, Tensor]:
        self._mode(training=True)
        now = self._load(buffers)
        gradient, loss = self._gradient(params, batch)
        if now:  # a model may have put new tensors in their place
            now = {name: self._buffer(name) for name in now}
        return gradient, now, loss

    def full(self, params: Tree, buffers: Tree, rows: Tensor) -> Tree:
        self._mode(training=False)
        self._load(buffers)
        total = zeros_like(params)
        for chunk in torch.split(rows, CHUNK):
            gradient, _ = self._gradient(params, Batch(chunk, None))
            total = add_scaled(total, len(chunk) / len(rows), gradient)
        return total

    def _gradient(self, params: Tree, batch: Batch) -> tuple[Tree, Tensor]:
        for parameter, value in zip(self._trained, params.values(), strict=True):
            parameter.data = value
        x, y = self.x.index_select(0, batch.rows), self.y.index_select(0, batch.rows)
        loss = self.task.loss(self.task.outputs(self.model, x, batch.draws), y)
        gradient = torch.autograd.grad(loss, self._trained, allow_unused=True)
        of = {
            # None where this loss does not reach the parameter. The layout is always the plain
            # one, as in a checkpoint, so that a resumed run sums in the same order.
            name: torch.zeros_like(params[name]) if g is None else g.contiguous()
            for name, g in zip(params, gradient, strict=True)
        }
        return of, loss.detach()

    def _load(self, buffers: Tree) -> Tree:
        if not self._owners:
            return buffers
        now = {name: b.clone() for name, b in (self._afresh | buffers).items()}
        for name, (module, attribute) in self._owners.items():
            module._buffers[attribute] = now[name]
        return {name: now[name] for name in buffers}

    def _buffer(self, name: str) -> Tensor:
        module, attribute = self._owners[name]
        held = module._buffers[attribute]
        assert held is not None
        return held.detach()

    def _mode(self, training: bool) -> None:
        if self._training is not training:
            self.model.train(training)
            self._training = training


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute
