"""What an algorithm does with a gradient as one program, for the loop on a GPU.

What follows the gradient of a large model is a dozen passes over everything that its client holds;
compiled, it is three or four.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...algorithm import AnyAlgorithm, GradAt
from ...local_round import Gradients, Underway, step
from ...tasks.images import Batch
from ...tasks.task import Task
from ...trees import Tree
from ..messages import Apart, take_apart
from ..nested import Structure, leaf_count, tree_flatten, tree_unflatten
from .program import Program, compiled, laid_out

_KINDS = 8  # of rounds that are compiled; the six methods have one or two


class AroundGradients:
    """Takes local steps: for each the gradient, as the executor takes it, and then a program."""

    def __init__(self, algorithm: AnyAlgorithm, task: Task) -> None:
        self.algorithm, self.task = algorithm, task
        self._like = next(iter(task.params.values()))
        self._known: dict[Any, _Update | None] = {}

    def __call__(
        self, gradients: Gradients, now: Underway, sent: Any, batches: Sequence[Batch]
    ) -> Underway:
        """What the steps give, to rounding."""
        stand_in: Any = self  # for the algorithm, of which a step needs no more than `client_step`
        for batch in batches:
            now = step(stand_in, gradients, now, sent, batch)
        return now

    def client_step(self, local: Any, sent: Any, grad_at: GradAt) -> Any:
        """The algorithm's, or the same as a program."""
        message = take_apart(sent, self._like)
        leaves, structure = tree_flatten(local)
        given = [laid_out(self.task, tensor) for tensor in (*leaves, *message.tensors)]
        key = message.flags, structure
        if key not in self._known and len(self._known) < _KINDS:
            self._known[key] = self._update(structure, message, given)
        update = self._known.get(key)
        if update is None:
            return self.algorithm.client_step(local, sent, grad_at)
        gradient = grad_at({name: given[at] for name, at in update.point.items()})
        found = update.program(*given, *(gradient[name] for name in self.task.params))
        return tree_unflatten(found, structure)

    def _update(
        self, structure: Structure, message: Apart, given: Sequence[Tensor]
    ) -> "_Update | None":
        """None where the algorithm does not ask for one gradient at a point that it is given."""
        held, asked = leaf_count(structure), list[Tree]()

        def flat(*tensors: Tensor) -> list[Tensor]:
            def grad_at(point: Tree) -> Tree:
                asked.append(point)
                return dict(zip(self.task.params, tensors[len(given) :], strict=True))

            local = tree_unflatten(tensors[:held], structure)
            sent = message.together(list(tensors[held : len(given)]))
            return tree_flatten(self.algorithm.client_step(local, sent, grad_at))[0]

        apart = [tensor.clone() for tensor in given]  # a model just received comes twice
        gradient = [torch.zeros_like(laid_out(self.task, p)) for p in self.task.params.values()]
        flat(*apart, *gradient)
        places = {id(tensor): at for at, tensor in enumerate(apart)}
        if len(asked) != 1 or any(id(t) not in places for t in asked[0].values()):
            return None
        point = {name: places[id(tensor)] for name, tensor in asked[0].items()}
        program = compiled(flat, [*apart, *gradient], "what follows a gradient", state=held)
        return _Update(program, point)


class _Update(NamedTuple):
    program: Program
    point: dict[str, int]
    """Where the gradient is taken: name -> place among what the program is given."""
