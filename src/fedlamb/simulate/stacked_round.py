"""A round of many clients of many trials as one pure function of tensors."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from ..algorithm import AnyAlgorithm
from ..local_round import Gradients, Outcome, Underway, begin, end, step
from ..tasks.images import Batch
from ..trees import Tree
from .compiled import Compiled
from .lanes import Lanes
from .nested import tree_map, tree_unflatten
from .padding import Named, Schedule
from .work import Upload


class Form(NamedTuple):
    """What decides a program beside its inputs."""

    algorithm: AnyAlgorithm
    broadcast: Callable[[list[Tensor]], Any]
    """Put together from its tensors."""
    flags: tuple[Any, ...]
    """What the broadcast holds beside tensors and numbers."""
    structure: Any
    """Of a client's state."""
    schedule: Schedule

    @property
    def key(self) -> tuple[Any, ...]:
        """The same for two rounds whose programs are the same."""
        return self.algorithm, self.flags, self.structure, self.schedule


def stacked_round(
    gradients: Gradients,
    form: Form,
    compiled: Compiled | None,
    lanes: Lanes,
    inputs: dict[str, Any],
) -> tuple[Any, Upload, Tree]:
    """Pure tensors in and out, with axes (trials, clients, ...): the clients' states, the mean of
    what they upload, and the largest of their counters."""
    of_trials = inputs["varied"], inputs["sent"], inputs["buffers"]

    def each(function: Callable[..., Any], of_trials: Any, *of_clients: Any) -> Any:
        """The function over trials and their clients."""

        def trial(of_trial: Any, *of_clients: Any) -> Any:
            varied, sent, buffers = of_trial
            algorithm: Any = form.algorithm
            algorithm = replace(algorithm, **varied) if varied else algorithm
            one = partial(function, algorithm, form.broadcast(sent), buffers)
            return vmap(one, randomness="different")(*of_clients)

        return vmap(trial, randomness="different")(of_trials, *of_clients)

    def start(algorithm: Any, sent: Any, buffers: Tree, state: Any, data: Named) -> Any:
        client = tree_unflatten(state, form.structure)
        return begin(algorithm, gradients, client, sent, buffers, Batch(**data))

    def go_on(algorithm: Any, sent: Any, _: Tree, now: Underway, batch: Named) -> Any:
        return step(algorithm, gradients, now, sent, Batch(**batch))

    def stop(algorithm: Any, sent: Any, _: Tree, now: Underway, steps: Tensor) -> Any:
        return end(algorithm, now, sent, steps)

    all_step = partial(each, go_on)
    if compiled is not None:
        all_step = partial(compiled, (form.algorithm, form.flags), all_step)

    def of_clients(states: Any, data: Named, batches: Named) -> Outcome:
        """The rounds of some clients, the longest first."""
        now: Underway = each(start, of_trials, states, data)
        finished: list[Underway] = []
        batches = dict(batches)
        steps, widths = batches.pop("steps"), form.schedule.widths
        of_steps = {n: _of_steps(t, widths) for n, t in batches.items() if n != "key"}
        if "key" in batches:
            of_steps["key"] = [key.clone() for key in batches["key"].unbind(2)]
        for number, (_, active, resting) in enumerate(zip(*form.schedule, strict=True)):
            if active < now.loss.shape[1]:  # the others are done
                finished.insert(0, tree_map(lambda t, a=active: t[:, a:], now))
                now = tree_map(lambda t, a=active: t[:, :a], now)
            batch = {name: parts[number][:, :active] for name, parts in of_steps.items()}
            after = all_step(of_trials, now, batch)
            if resting:
                at_work = steps[:, :active] > number
                after = tree_map(partial(_where, at_work), after, now)
            now = after
        if finished:
            now = tree_map(lambda *parts: torch.cat(parts, dim=1), now, *finished)
        ended: Outcome = each(stop, of_trials, now, steps)
        return ended

    of_each_client = inputs["states"], inputs["data"], inputs["batches"]
    side_by_side = lanes if compiled is not None and form.schedule.even else _at_once
    outcome: Outcome = side_by_side(of_clients, *of_each_client)

    def mean(tree: Any) -> Any:
        return tree_map(lambda t: torch.einsum("tc,tc...->t...", inputs["shares"], t), tree)

    before = inputs["buffers"]
    averaged = {n: b for n, b in outcome.buffers.items() if b.is_floating_point()}
    change = {n: b - before[n][:, None] for n, b in averaged.items()}
    largest = {n: b.amax(dim=1) for n, b in outcome.buffers.items() if n not in averaged}
    upload = Upload(outcome.report, change, {"loss": outcome.loss})
    return outcome.client, mean(upload), largest


def _of_steps(tensor: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """The parts of (trials, clients, rows of all steps, ...), each in one piece of memory; steps of
    the same width are laid out together."""
    found: list[Tensor] = []
    first = 0
    for width, same in groupby(widths):
        count = len([*same])
        part = tensor[:, :, first : first + count * width]
        part = part.reshape(*part.shape[:2], count, width, *part.shape[3:])
        found += part.movedim(2, 0).contiguous().unbind()
        first += count * width
    return found


def _at_once(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def _where(at_work: Tensor, after: Tensor, before: Tensor) -> Tensor:
    if after is before:
        return before
    return torch.where(at_work.reshape(*at_work.shape, *[1] * (after.dim() - 2)), after, before)
