"""Local steps of one client after another as compiled programs, for the loop on a CPU.

A step of a small model is some thirty operations, each with a cost of its own beside its work.
Compiled, they are a few loops around the products, and a step is a call with a list of tensors.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...algorithm import AnyAlgorithm
from ...local_round import Gradients, Underway, step
from ...tasks.images import Batch
from ...tasks.task import Task
from ..functional import OfPicked
from ..messages import Apart, take_apart
from ..nested import Structure, leaf_count, tree_flatten, tree_unflatten
from .program import Program, compiled, laid_out

_AHEAD = 16  # steps whose rows are picked together


class CompiledSteps:
    """Runs local rounds by programs, one for each kind of round and size of batch.

    sizes: of the batches that are compiled.
    """

    def __init__(self, algorithm: AnyAlgorithm, task: Task, sizes: frozenset[int]) -> None:
        self.algorithm, self.task, self.sizes = algorithm, task, sizes
        self._gradients = OfPicked(task, copy.deepcopy(task.model))
        self._like = next(iter(task.params.values()))
        self._programs: dict[Any, dict[int, Program]] = {}

    def __call__(
        self, gradients: Gradients, now: Underway, sent: Any, batches: Sequence[Batch]
    ) -> Underway:
        """What the steps give, to rounding; those of other sizes are taken plainly."""
        message = take_apart(sent, self._like)
        leaves, structure = tree_flatten(now)
        # Programs are for one layout of each tensor.
        state = [self._laid_out(leaf) for leaf in leaves]
        fixed = [*map(self._laid_out, message.tensors)]
        names = [name for name, part in batches[0]._asdict().items() if part is not None]
        known = self._programs.setdefault((message.flags, tuple(names)), {})
        with torch.no_grad():
            for batch, data in zip(batches, self._picked(batches), strict=True):
                given = [*fixed, *data, *(part for part in batch if part is not None)]
                size = len(batch.rows)
                if size not in known and size in self.sizes:
                    flat = self._step(structure, message, names)
                    examples = [*state, *given]
                    known[size] = compiled(flat, examples, "a local step", state=len(state))
                if size in known:
                    state = known[size](*state, *given)
                    continue
                with torch.enable_grad():
                    now = tree_unflatten(state, structure)
                    now = step(self.algorithm, gradients, now, sent, batch)
                state = [self._laid_out(leaf) for leaf in tree_flatten(now)[0]]
        after: Underway = tree_unflatten(state, structure)
        return after

    def _picked(self, batches: Sequence[Batch]) -> Iterator[tuple[Tensor, ...]]:
        """Inputs and targets of each batch; picked inside a program, rows would wait for memory
        one after another."""
        for start in range(0, len(batches), _AHEAD):
            rows = [batch.rows for batch in batches[start : start + _AHEAD]]
            whole, sizes = torch.cat(rows), [len(each) for each in rows]
            found = [torch.split(part.index_select(0, whole), sizes) for part in self.task.train]
            yield from zip(*found, strict=True)

    def _laid_out(self, tensor: Tensor) -> Tensor:
        return laid_out(self.task, tensor)

    def _step(self, structure: Structure, message: Apart, names: list[str]) -> Program:
        """A local step as a pure function of (state, message, inputs and targets, batch)."""
        first = leaf_count(structure)
        last = first + len(message.tensors)

        def flat(*tensors: Tensor) -> list[Tensor]:
            state, sent = tensors[:first], message.together(list(tensors[first:last]))
            inputs, targets, *parts = tensors[last:]
            gradients = self._gradients.reading(inputs, targets)
            batch = Batch(**dict(zip(names, parts, strict=True)))
            now = tree_unflatten(state, structure)
            after = step(self.algorithm, gradients, now, sent, batch)
            return tree_flatten(after)[0]

        return flat
