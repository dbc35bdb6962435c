"""The model's pass over the test data as a compiled program."""

from typing import Any

from torch import Tensor

from ...tasks.task import Task
from ...trees import Tree
from .program import Program, compiled, laid_out

_KINDS = 4  # of inputs that are compiled: two sizes of chunks for each of two data sets


class CompiledOutputs:
    """What the model makes of stored inputs, in place of `Task.outputs_of`."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._programs: dict[Any, Program] = {}

    def __call__(self, state: Tree, x: Tensor) -> Tensor:
        """The outputs, to rounding."""
        known, kind, names = self._programs, (x.shape, x.dtype), list(state)
        given = [*(laid_out(self.task, t) for t in state.values()), x]
        if kind not in known and len(known) == _KINDS:
            return self.task.outputs_of(state, x)
        if kind not in known:

            def outputs(*tensors: Tensor) -> list[Tensor]:
                now = dict(zip(names, tensors, strict=False))
                return [self.task.outputs_of(now, tensors[-1])]

            known[kind] = compiled(outputs, given, "the test pass")
        (found,) = known[kind](*given)
        return found
