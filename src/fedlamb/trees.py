"""Arithmetic on trees: flat dictionaries from parameter name to tensor.

A tree is never changed in place; `{}` means "nothing this round". Every function here works
on plain tensors and under `torch.func.vmap`, and every scalar may be a number or a tensor, so
that a grid of hyper-parameters is one more batched axis.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Tree = dict[str, Tensor]
Scalar = float | Tensor


def tree_map(f: Callable[..., Tensor], *trees: Tree) -> Tree:
    """`f` on the tensors of each name; all trees have the names of the first."""
    first, *rest = trees
    return {name: f(t, *(other[name] for other in rest)) for name, t in first.items()}


def zeros_like(tree: Tree) -> Tree:
    """A tree of zeros."""
    return tree_map(torch.zeros_like, tree)


def full_like(tree: Tree, value: Scalar) -> Tree:
    """A tree that holds `value` everywhere."""
    return tree_map(lambda t: torch.zeros_like(t) + value, tree)


def add(a: Tree, b: Tree) -> Tree:
    """a + b"""
    return _each("add", a, b)


def subtract(a: Tree, b: Tree) -> Tree:
    """a - b"""
    return _each("sub", a, b)


def divide(a: Tree, b: Tree) -> Tree:
    """a / b"""
    return _each("div", a, b)


def sqrt(tree: Tree) -> Tree:
    """Element-wise square root."""
    return _each("sqrt", tree)


def maximum(a: Tree, b: Tree) -> Tree:
    """Element-wise maximum."""
    return _each("maximum", a, b)


def add_scaled(x: Tree, scale: Scalar, u: Tree) -> Tree:
    """x + scale * u"""
    if not isinstance(scale, Tensor):
        return _each("add", x, u, alpha=scale)
    if transformed() or scale.dim() > 0 or not u:
        return tree_map(lambda a, b: a + scale.to(a.dtype) * b, x, u)
    return add(x, dict(zip(u, torch._foreach_mul(_list(u), scale), strict=True)))


def lerp(a: Tree, b: Tree, weight: Scalar) -> Tree:
    """(1 - weight) * a + weight * b; exactly a where a equals b."""
    if isinstance(weight, Tensor):
        return tree_map(lambda x, y: torch.lerp(x, y, weight.to(x.dtype)), a, b)
    return _each("lerp", a, b, weight=weight)


def lerp_square(a: Tree, b: Tree, weight: Scalar) -> Tree:
    """(1 - weight) * a + weight * b^2"""
    if transformed() or isinstance(weight, Tensor):
        return tree_map(lambda x, y: torch.lerp(x, y * y, _like(weight, x)), a, b)
    # In parts: torch's own lerp loses three digits where the weight of its end is near 1.
    kept = torch._foreach_mul(_list(a), 1 - weight)
    values = [b[key] for key in a]
    torch._foreach_addcmul_(kept, values, values, value=weight)
    return dict(zip(a, kept, strict=True))


def add_each_scaled(x: Tree, scales: Tree, u: Tree) -> Tree:
    """x + scale * u, with a scalar of its own for each tensor."""
    if transformed():
        return tree_map(lambda a, scale, b: a + scale * b, x, scales, u)
    scaled = _each("mul", u, scales)
    torch._foreach_add_(_list(scaled), [x[key] for key in u])  # in memory that is still in cache
    return {key: scaled[key] for key in x}


def norms(tree: Tree) -> Tree:
    """The L2 norm of each tensor."""
    if transformed():
        return tree_map(torch.linalg.vector_norm, tree)
    return _each("norm", tree)


def detached(tree: Mapping[str, Tensor]) -> Tree:
    """The same numbers in plain memory of their own, outside any autograd graph."""
    plain = torch.contiguous_format
    return {name: t.detach().clone(memory_format=plain) for name, t in tree.items()}


def laid_out_like(like: Tensor, tensor: Tensor) -> Tensor:
    """The same numbers, in the order of `like` in memory."""
    return tensor if tensor.stride() == like.stride() else torch.empty_like(like).copy_(tensor)


def _each(name: str, *trees: Tree, **numbers: float) -> Tree:
    """torch's function of that name on the tensors of each name.

    All tensors in one call, which saves most of the time on small ones; one by one under vmap,
    for which the calls on lists are not defined.
    """
    first, *rest = trees
    if transformed():
        function = getattr(torch, name)
        return tree_map(lambda *tensors: function(*tensors, **numbers), first, *rest)
    if not first:
        return {}
    lists = [[tree[key] for key in first] for tree in rest]
    on_lists: Any = getattr(torch, f"_foreach_{name}")
    return dict(zip(first, on_lists(_list(first), *lists, **numbers), strict=True))


def _like(weight: Scalar, tensor: Tensor) -> Scalar:
    return weight.to(tensor.dtype) if isinstance(weight, Tensor) else weight


def _list(tree: Tree) -> list[Tensor]:
    return list(tree.values())


def transformed() -> bool:
    """Whether this runs inside one of `torch.func`'s transforms, or is being compiled."""
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None


def under_vmap() -> bool:
    """Whether this runs inside `vmap`, where tensors have hidden axes."""
    layers = torch._C._functorch.get_interpreter_stack() or ()
    return any(layer.key() == torch._C._functorch.TransformType.Vmap for layer in layers)
