"""Broadcasts taken apart: tensors and numbers, which change from round to round, and the rest."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..algorithm import Kept
from .nested import tree_flatten, tree_unflatten


class Apart(NamedTuple):
    """A message as a list of tensors, and how to put it together again."""

    tensors: list[Tensor]
    """Its tensors, and its floating numbers as tensors."""
    together: Callable[[list[Tensor]], Any]
    """The message with these tensors in their place."""
    flags: tuple[Any, ...]
    """Everything else: whole numbers, truth values, words."""


def take_apart(message: Any, like: Tensor) -> Apart:
    """Numbers get the device and dtype of `like`; versions of what clients keep are left out,
    since clients do not see them."""
    shown = type(message)(*(f._replace(version=0) if isinstance(f, Kept) else f for f in message))
    leaves, structure = tree_flatten(shown)
    moves = [isinstance(leaf, Tensor | float) for leaf in leaves]
    flags = tuple(leaf for leaf, moving in zip(leaves, moves, strict=True) if not moving)
    tensors = [
        leaf if isinstance(leaf, Tensor) else _number(leaf, like)
        for leaf, moving in zip(leaves, moves, strict=True)
        if moving
    ]

    def together(new: list[Tensor]) -> Any:
        moving, rest = iter(new), iter(flags)
        return tree_unflatten([next(moving if m else rest) for m in moves], structure)

    return Apart(tensors, together, flags)


def _number(value: float, like: Tensor) -> Tensor:
    """Made on the device: to send it there would wait until the device is idle."""
    rounded = torch.tensor(value, dtype=like.dtype).item()  # too large a number becomes infinite
    return like.new_full((), rounded)
