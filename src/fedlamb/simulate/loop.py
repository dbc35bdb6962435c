"""The loop executor: clients one after another, any model, memory of one client."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..algorithm import AnyAlgorithm
from ..algorithms import ALGORITHMS
from ..errors import SettingError
from ..local_round import Gradients, Outcome, Steps, local_round
from ..plan import Plan
from ..randomness import own_random_state
from ..tasks.dropout import keyed_layers
from ..tasks.images import Batch
from ..tasks.task import Task
from ..trees import Tree, add_scaled, laid_out_like, tree_map, zeros_like
from .allocator import keep_freed_memory
from .client_store import ClientStore
from .compiled_loop.around_gradients import AroundGradients
from .compiled_loop.full_gradients import FullGradients
from .compiled_loop.sizes import Sizes, parts
from .compiled_loop.steps import CompiledSteps
from .cuda_graph import Replayed
from .messages import take_apart
from .nested import tree_flatten
from .nested import tree_map as tree_map_all
from .planned import Planned
from .running_mean import RunningMean
from .saying import leads, say
from .sharing import same_but_start, same_programs
from .work import Assignment, Collected, OnClient, Upload, average_buffers


class Loop:
    """Runs a cohort client by client, with plain autograd on one copy of the model."""

    def __init__(
        self,
        algorithm: AnyAlgorithm,
        task: Task,
        plan: Plan,
        weighting: str,
        store: ClientStore,
        compile: bool = False,
    ) -> None:
        keep_freed_memory()
        self.algorithm, self.store = algorithm, store
        self.task = task
        self._plan, self._planned = plan, Planned(plan, task.augments, weighting)
        self._sizes = Sizes.of(plan) if compile else None
        on_gpu = task.device.type == "cuda"
        self.gradients: Gradients = Autograd(task, self._sizes if on_gpu else None)
        self._compiled: Steps | None = None
        if self._sizes and on_gpu:
            self._compiled = AroundGradients(algorithm, task)
        elif self._sizes:
            self.gradients = FullGradients(task, self.gradients, self._sizes.full)
            self._compiled = CompiledSteps(algorithm, task, self._sizes.steps)
        lanes = 0
        if on_gpu:
            large = sum(p.numel() for p in task.params.values()) >= _LARGE
            lanes = 6 if large else 1
        self._lanes = [_Lane(task.device) for _ in range(lanes)]
        self._trusted = type(algorithm) in ALGORITHMS.values()

    def run(self, round: int, sent: Any, buffers: Tree, on_client: OnClient) -> Collected:
        """One round of the plan's cohort; changes nothing but what it returns."""
        averaged = {name: b for name, b in buffers.items() if b.is_floating_point()}
        counters = {name: b for name, b in buffers.items() if name not in averaged}
        mean = RunningMean()
        states: dict[int, Any] = {}
        # The whole cohort is planned first: between two clients the same takes several times
        # as long, since by then the caches hold nothing but models and data.
        work = self._planned.work(round)
        with torch.enable_grad(), own_random_state(self.task.device) as generator:
            for lane in self._lanes:
                lane.begin()
            for each in work:
                try:
                    generator.manual_seed(self._plan.model_seed(round, each.client))
                    outcome = self._local_round(len(states), each, round, sent, buffers)
                except Exception as error:
                    error.add_note(f"in the local round of client {each.client}, round {round}")
                    raise
                states[each.client] = outcome.client
                on_client(len(states), len(work))
                change = tree_map(torch.sub, {n: outcome.buffers[n] for n in averaged}, averaged)
                mean.add(Upload(outcome.report, change, {"loss": outcome.loss}), each.weight)
                counters = {n: torch.maximum(c, outcome.buffers[n]) for n, c in counters.items()}
        moved = average_buffers(buffers, mean.value.buffers, counters)
        return Collected(mean.value.report, moved, mean.value.loss["loss"], states)

    def prepare(self, round: int) -> None:
        """Plans the round."""
        self._planned.work(round)

    def share(self, other: "Loop") -> bool:
        """Goes on with what another loop has compiled and recorded, as far as it fits this one;
        says whether all of it does."""
        if self._sizes != other._sizes or not same_but_start(self.task, other.task):
            return False
        self.gradients = other.gradients
        if not same_programs(self.algorithm, other.algorithm):
            return False
        self._compiled, self._lanes = other._compiled, other._lanes
        return True

    def _local_round(
        self, number: int, each: Assignment, round: int, sent: Any, buffers: Tree
    ) -> Outcome:
        if self._lanes:
            lane = self._lanes[number % len(self._lanes)]
            with lane:  # a new client's state is made here as well: the lane does not wait for more
                state = self.store.state(each.client)
                outcome = self._on_the_gpu(lane.replayed, each, round, state, sent, buffers)
            return lane.handed_over(outcome)
        state = self.store.state(each.client)
        given = self.gradients, state, sent, buffers, Batch(each.rows), each.batches()
        if self._trusted:
            return local_round(self.algorithm, *given, steps=self._compiled)
        self._trusted = True  # after the first client of an algorithm of one's own
        with _untouched(self.algorithm, state, sent):
            return local_round(self.algorithm, *given, steps=self._compiled)

    def _on_the_gpu(
        self,
        replayed: Replayed,
        each: Assignment,
        round: int,
        state: Any,
        sent: Any,
        buffers: Tree,
    ) -> Outcome:
        """The whole local round as one graph; its kernels alone would wait to be launched."""
        device = self.task.device
        message = take_apart(sent, next(iter(self.task.params.values())))
        # Round 1 is unlike the others under most methods: nothing is compiled for it alone.
        steps = self._compiled if round > 1 else None

        def program(inputs: dict[str, Any]) -> Outcome:
            return local_round(
                self.algorithm,
                self.gradients,
                inputs["state"],
                message.together(inputs["sent"]),
                inputs["buffers"],
                Batch(**inputs["data"]),
                [Batch(**batch) for batch in inputs["batches"]],
                steps=steps,
            )

        inputs = {
            "state": tree_map_all(self.task.laid_out, state),
            "sent": [self.task.laid_out(t) for t in message.tensors],
            "buffers": buffers,
            "data": _on(device, Batch(each.rows)),
            "batches": [_on(device, batch) for batch in each.batches()],
        }
        kind = message.flags, steps is None
        outcome: Outcome = replayed(kind, program, inputs)
        return outcome


@contextmanager
def _untouched(algorithm: AnyAlgorithm, state: Any, sent: Any) -> Iterator[None]:
    """Raises where a client's round changes in place what it was given."""
    given = [t for t in tree_flatten((state, sent))[0] if isinstance(t, Tensor)]
    versions = [t._version for t in given]
    yield
    if versions != [t._version for t in given]:
        right = "must not change in place what it is given: x - y rather than x.sub_(y)"
        raise SettingError("algorithm", type(algorithm).__name__, right)


_LARGE = 1_000_000  # parameters; six such clients side by side fill a GPU better than one


class _Lane:
    """A stream of the GPU with graphs of its own; clients on different lanes run side by side."""

    def __init__(self, device: torch.device) -> None:
        self.replayed = Replayed()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._context: Any = None

    def begin(self) -> None:
        """What was asked of the GPU before the round is done first."""
        self._stream.wait_stream(torch.cuda.current_stream())

    def __enter__(self) -> None:
        self._context = torch.cuda.stream(self._stream)
        self._context.__enter__()

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(*error)

    def handed_over(self, outcome: Outcome) -> Outcome:
        """The outcome, for use outside the lane once it is there."""
        outside = torch.cuda.current_stream()
        outside.wait_stream(self._stream)
        for tensor in tree_flatten(outcome)[0]:
            tensor.record_stream(outside)
        return outcome


class Autograd:
    """Gradients by plain autograd on one private copy of the model.

    Parameters are put into the model by reference, buffers by a copy, since training mode
    changes them in place. Buffers that are not part of the state start afresh each time.
    compile: the sizes of batches that the model is compiled for.
    """

    def __init__(self, task: Task, compile: Sizes | None = None) -> None:
        self.task, self.model = task, copy.deepcopy(task.model)
        self._compiled: Any = torch.compile(self.model, dynamic=False) if compile else None
        self._sizes = compile
        self._said = set[str]()
        self.x, self.y = task.train
        self._parameters = dict(self.model.named_parameters())
        self._trained = [self._parameters[name] for name in task.params]
        found = {name: b.clone() for name, b in self.model.named_buffers()}
        keyed = keyed_layers(self.model)
        self._keyed = [*keyed.values()]
        self._owners = {name: _owner(self.model, name) for name in found if name not in keyed}
        self._afresh = {name: found[name] for name in self._owners if name not in task.buffers}
        self._training: bool | None = None

    def minibatch(self, params: Tree, buffers: Tree, batch: Batch) -> tuple[Tree, Tree, Tensor]:
        self._mode(training=True)
        now = self._load(buffers)
        for layer in self._keyed:
            layer._buffers["key"], layer.calls = batch.key, 0
        gradient, loss = self._gradient(params, batch)
        if now:  # a model may have put new tensors in their place
            now = {name: self._buffer(name) for name in now}
        return gradient, now, loss

    def full(self, params: Tree, buffers: Tree, data: Batch) -> Tree:
        self._mode(training=False)
        self._load(buffers)
        total = zeros_like(params)
        for chunk in torch.split(data.rows, parts(len(data.rows))):
            gradient, _ = self._gradient(params, Batch(chunk))
            total = add_scaled(total, len(chunk) / len(data.rows), gradient)
        return total

    def _gradient(self, params: Tree, batch: Batch) -> tuple[Tree, Tensor]:
        for parameter, value in zip(self._trained, params.values(), strict=True):
            parameter.data = value
        x, y = self.x.index_select(0, batch.rows), self.y.index_select(0, batch.rows)
        loss = self.task.loss(self.task.outputs(self._model_for(len(y)), x, batch.draws), y)
        gradient = torch.autograd.grad(loss, self._trained, allow_unused=True)
        of = {
            # None where this loss does not reach the parameter. The layout is always that of the
            # parameters, so that a resumed run sums in the same order.
            name: torch.zeros_like(params[name]) if g is None else laid_out_like(params[name], g)
            for name, g in zip(params, gradient, strict=True)
        }
        return of, loss.detach()

    def _model_for(self, size: int) -> Any:
        """Compiled for batches of this size, or as it is where they are rare."""
        if self._sizes is None:
            return self.model
        frequent = size in (self._sizes.steps if self._training else self._sizes.full)
        self._say_once("compiling the model …" if frequent else "rare sizes stay uncompiled")
        return self._compiled if frequent else self.model

    def _say_once(self, text: str) -> None:
        if text not in self._said and leads():
            say(text)
        self._said.add(text)

    def _load(self, buffers: Tree) -> Tree:
        if not self._owners:
            return buffers
        now = _copies(self._afresh | buffers)
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


def _copies(tensors: Tree) -> Tree:
    """Numbers of one kind in one call; a call for each takes longer."""
    found: Tree = {}
    for dtype in {t.dtype for t in tensors.values()}:
        some = {n: t for n, t in tensors.items() if t.dtype == dtype}
        whole = [t.clone() for t in some.values()] if dtype == torch.bool else None
        found |= zip(some, whole or torch._foreach_mul(list(some.values()), 1), strict=True)
    return {name: found[name] for name in tensors}


def _on(device: torch.device, batch: Batch) -> dict[str, Tensor]:
    """The parts of a batch that are there, on the device."""
    return {name: part.to(device) for name, part in batch._asdict().items() if part is not None}
