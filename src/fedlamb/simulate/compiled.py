"""Programs traced once for each shape of their inputs and compiled by `torch.compile`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..randomness import kept_random_state
from .saying import compiling
from .stacked.pooled import JoinedPools
from .stacked.products import with_stacked_products


class Compiled:
    """Runs pure functions on trees of tensors; the first call for a shape takes seconds."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[Callable[..., Any], TreeSpec]] = {}

    def __call__(self, key: Any, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function gives; `key` tells apart functions that differ otherwise."""
        leaves, structure = tree_flatten(arguments)
        # Views that share memory, such as a model sent to all, would be traced as what they are.
        tensors = [leaf.contiguous() for leaf in leaves]
        whole = (key, str(structure), tuple((t.shape, t.dtype) for t in tensors))
        if whole not in self._known:
            with compiling("a local step"), kept_random_state(tensors[0].device):
                found = self._known[whole] = _compile(function, tensors, structure)
                found[0](*tensors)
        program, of = self._known[whole]
        return tree_unflatten(program(*tensors), of)


def _compile(
    function: Callable[..., Any], tensors: list[Tensor], structure: TreeSpec
) -> tuple[Callable[..., Any], TreeSpec]:
    of: list[TreeSpec] = []

    def flat(*given: Tensor) -> list[Tensor]:
        leaves, spec = tree_flatten(function(*tree_unflatten(given, structure)))
        of.append(spec)
        return leaves

    # Traced first: the result is a plain list of operations, without vmap and without trees.
    with JoinedPools():
        traced = make_fx(flat, decomposition_table=_IN_STAGES)(*tensors)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    traced = with_stacked_products(traced)
    return torch.compile(traced, dynamic=False), of[0]


def _norm(
    x: Tensor,
    ord: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """A norm over several axes, first over the last of them: these sums are taken by the loop that
    makes the numbers, while cutting the whole into parts of equal size would need another."""
    axes = sorted(a % x.dim() for a in (range(x.dim()) if dim is None else dim))
    if ord != 2 or len(axes) < 2 or keepdim or dtype is not None or not x.is_floating_point():
        return NotImplemented
    return (x * x).sum(axes[-1]).sum(axes[:-1]).sqrt()


_IN_STAGES = {torch.ops.aten.linalg_vector_norm.default: _norm}
