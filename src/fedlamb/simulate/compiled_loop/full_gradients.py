"""The exact gradient over all of a client's rows, which Mime asks for, by compiled programs."""

import copy

import torch
from torch import Tensor

from ...local_round import Gradients
from ...tasks.images import Batch
from ...tasks.task import Task
from ...trees import Tree, laid_out_like
from ..functional import OfPicked
from .program import Program, compiled, laid_out
from .sizes import parts


class FullGradients:
    """Gradients of minibatches as they were, those over all rows by programs.

    sizes: of the parts that are compiled.
    """

    def __init__(self, task: Task, plain: Gradients, sizes: frozenset[int]) -> None:
        self.task, self._plain, self.sizes = task, plain, sizes
        self._gradients = OfPicked(task, copy.deepcopy(task.model))
        self._programs: dict[int, Program] = {}

    def minibatch(self, params: Tree, buffers: Tree, batch: Batch) -> tuple[Tree, Tree, Tensor]:
        """As before."""
        return self._plain.minibatch(params, buffers, batch)

    def full(self, params: Tree, buffers: Tree, data: Batch) -> Tree:
        """The gradient, to rounding; over clients with parts of other sizes as before."""
        if not self.sizes.issuperset(parts(len(data.rows))):
            return self._plain.full(params, buffers, data)
        model = [laid_out(self.task, t) for t in (params | buffers).values()]
        total = [torch.zeros_like(t) for t in model[: len(params)]]
        with torch.no_grad():
            for rows in torch.split(data.rows, parts(len(data.rows))):
                x, y = (part.index_select(0, rows) for part in self.task.train)
                share = model[0].new_tensor(len(rows) / len(data.rows))
                given = [*total, *model, x, y, share]
                if len(rows) not in self._programs:
                    flat = self._sum(params, buffers)
                    what = "the full gradient"
                    self._programs[len(rows)] = compiled(flat, given, what, state=len(total))
                total = self._programs[len(rows)](*given)
        found = zip(params.items(), total, strict=True)
        return {name: laid_out_like(p, t) for (name, p), t in found}

    def _sum(self, params: Tree, buffers: Tree) -> Program:
        """Adds the gradient of some rows, by their share, as a pure function of (sum, model, inputs
        and targets, share)."""
        names, first, last = [*params, *buffers], len(params), 2 * len(params) + len(buffers)

        def flat(*tensors: Tensor) -> list[Tensor]:
            inputs, targets, share = tensors[last:]
            model = dict(zip(names, tensors[first:last], strict=True))
            now = {name: model[name] for name in params}, {name: model[name] for name in buffers}
            gradient = self._gradients.reading(inputs, targets).full_of_picked(*now)
            added = zip(tensors[:first], gradient.values(), strict=True)
            return [old + share * new for old, new in added]

        return flat
