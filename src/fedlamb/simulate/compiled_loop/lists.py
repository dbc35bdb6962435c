"""Operations on lists of tensors, written for compiled programs on a GPU.

torch's compiler makes one kernel of such operations, for all tensors of the lists. Two it writes
otherwise than we want: its `lerp` loses three digits where the weight is near 1, and its `stack` is
a kernel for each tensor. What is written on a list is taken apart, so that it is one as well.
"""

from typing import Any

import torch
from torch import Tensor

from ...operations import define

aten = torch.ops.aten


def lerp(start: list[Tensor], end: list[Tensor], weight: float) -> Any:
    """`aten::_foreach_lerp`, from whichever end is nearer, as torch does it outside of programs."""
    apart = aten._foreach_sub.List(end, start)
    if weight < 0.5:
        return aten._foreach_add.List(start, aten._foreach_mul.Scalar(apart, weight))
    return aten._foreach_sub.List(end, aten._foreach_mul.Scalar(apart, 1 - weight))


def addcmul_(sums: list[Tensor], a: list[Tensor], b: list[Tensor], value: float = 1) -> None:
    """`aten::_foreach_addcmul_`"""
    scaled = aten._foreach_mul.Scalar(aten._foreach_mul.List(a, b), value)
    for tensor, found in zip(sums, aten._foreach_add.List(sums, scaled), strict=True):
        tensor.copy_(found)


def stack(tensors: list[Tensor], dim: int = 0) -> Any:
    """`aten::stack`, for numbers; or NotImplemented."""
    return torch.ops.fedlamb.stack(tensors) if tensors[0].dim() == 0 else NotImplemented


define("stack(Tensor[] tensors) -> Tensor", torch.stack, torch.stack, devices=("CPU", "CUDA"))

DECOMPOSITIONS: dict[Any, Any] = {
    aten._foreach_lerp.Scalar: lerp,
    aten._foreach_addcmul_.Scalar: addcmul_,
    aten.stack.default: stack,
}
"""For `make_fx`."""
