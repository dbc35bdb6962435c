"""Local steps of one client after another as compiled programs, for the loop on a CPU.

A step of a small model is some thirty operations, each with a cost of its own beside its work.
Compiled, they are a few loops around the products, and a step is a call with a list of tensors.
"""

import copy
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..algorithm import AnyAlgorithm
from ..errors import SettingError
from ..files import exclusive
from ..local_round import Gradients, Underway, step
from ..tasks.images import Batch
from ..tasks.task import Task
from .functional import Functional
from .messages import Apart, take_apart
from .pooling import DECOMPOSITIONS

Program = Callable[..., list[Tensor]]
_SIZES = 4  # of batches, compiled for each kind of round; clients of many sizes have many


class CompiledSteps:
    """Runs local rounds by programs, one for each kind of round and size of batch."""

    def __init__(self, algorithm: AnyAlgorithm, task: Task) -> None:
        self.algorithm, self.task = algorithm, task
        self._gradients = Functional(task, copy.deepcopy(task.model))
        self._like = next(iter(task.params.values()))
        self._programs: dict[Any, dict[int, Program]] = {}

    def __call__(
        self, gradients: Gradients, now: Underway, sent: Any, batches: Sequence[Batch]
    ) -> Underway:
        """What the steps give, to rounding; those of rare sizes are taken plainly."""
        message = take_apart(sent, self._like)
        leaves, structure = tree_flatten(now)
        # Programs are for one layout of each tensor.
        state = [self._laid_out(leaf) for leaf in leaves]
        fixed = [*map(self._laid_out, message.tensors), *self.task.train]
        for batch in batches:
            parts = {name: part for name, part in batch._asdict().items() if part is not None}
            known = self._programs.setdefault((message.flags, tuple(parts)), {})
            size = len(batch.rows)
            with torch.no_grad():
                if size not in known and len(known) < _SIZES:
                    flat = self._step(structure, message, list(parts))
                    known[size] = _compiled(flat, [*state, *fixed, *parts.values()])
                if size in known:
                    state = known[size](*state, *fixed, *parts.values())
                    continue
            now = step(self.algorithm, gradients, tree_unflatten(state, structure), sent, batch)
            state = [self._laid_out(leaf) for leaf in tree_flatten(now)[0]]
        after: Underway = tree_unflatten(state, structure)
        return after

    def _laid_out(self, tensor: Tensor) -> Tensor:
        if tensor.dim() == 4 and self.task.channels_last:
            # contiguous() would leave one channel as it is, and what a convolution gives with it.
            return tensor.to(memory_format=torch.channels_last)
        return tensor.contiguous()

    def _step(self, structure: TreeSpec, message: Apart, names: list[str]) -> Program:
        """A local step as a pure function of (state, message, training data, batch)."""
        first = structure.num_leaves
        last = first + len(message.tensors)

        def flat(*tensors: Tensor) -> list[Tensor]:
            state, sent = tensors[:first], message.together(list(tensors[first:last]))
            inputs, targets, *parts = tensors[last:]
            gradients = self._gradients.reading(inputs, targets)
            batch = Batch(**dict(zip(names, parts, strict=True)))
            now = tree_unflatten(state, structure)
            after = step(self.algorithm, gradients, now, sent, batch)
            return [
                new if new.stride() == old.stride() else torch.empty_like(old).copy_(new)
                for old, new in zip(state, tree_flatten(after)[0], strict=True)
            ]

        return flat


def _compiled(function: Program, examples: list[Tensor]) -> Program:
    begun = time.perf_counter()
    # A tensor that comes twice, such as a model just received, would be traced as one.
    at = [example.data_ptr() for example in examples]
    apart = [e.clone() if at[i] in at[:i] else e for i, e in enumerate(examples)]
    traced = make_fx(function, decomposition_table=DECOMPOSITIONS)(*apart)
    try:
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        # By default a pool of processes would start up, for kernels that a CPU has none of. Of
        # several workers one compiles, and the others find its programs in the cache.
        one_thread = torch._inductor.config.patch(compile_threads=1)
        with one_thread, exclusive(Path(cache_dir()) / "fedlamb.lock", wait=True):
            program: Program = torch._inductor.compile(traced, list[Any](apart))
            program(*apart)
    except Exception as error:
        raise SettingError(
            "compile", True, f"does not work here; leave it off, or install g++ ({error})"
        ) from error
    seconds = time.perf_counter() - begun
    print(f"fedlamb: compiled a local step in {seconds:.1f} s", file=sys.stderr)
    return program
