"""Arithmetic on trees: flat dictionaries from parameter name to tensor.

A tree is never changed in place; `{}` means "nothing this round". Every function here works
on plain tensors and under `torch.func.vmap`, and every scalar may be a number or a tensor, so
that a grid of hyper-parameters is one more batched axis.
"""

from collections.abc import Callable, Mapping

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
    return tree_map(torch.add, a, b)


def subtract(a: Tree, b: Tree) -> Tree:
    """a - b"""
    return tree_map(torch.sub, a, b)


def divide(a: Tree, b: Tree) -> Tree:
    """a / b"""
    return tree_map(torch.div, a, b)


def sqrt(tree: Tree) -> Tree:
    """Element-wise square root."""
    return tree_map(torch.sqrt, tree)


def maximum(a: Tree, b: Tree) -> Tree:
    """Element-wise maximum."""
    return tree_map(torch.maximum, a, b)


def add_scaled(x: Tree, scale: Scalar, u: Tree) -> Tree:
    """x + scale * u, in one pass where the scale is a plain number."""
    if isinstance(scale, Tensor):
        return tree_map(lambda a, b: a + scale * b, x, u)
    return tree_map(lambda a, b: torch.add(a, b, alpha=scale), x, u)


def detached(tree: Mapping[str, Tensor]) -> Tree:
    """The same numbers in memory of their own, outside any autograd graph."""
    return {name: t.detach().clone() for name, t in tree.items()}
