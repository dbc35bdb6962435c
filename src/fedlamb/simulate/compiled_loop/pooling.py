"""Max-pooling by windows of 2 × 2, written for compiled programs on a CPU.

torch's own reads one pixel at a time. Here the four pixels of all windows are compared as four
images, which a compiler turns into one loop over vectors. The same numbers, and of equal pixels
the same one is the largest: the first, row by row.
"""

from typing import Any

import torch
from torch import Tensor

from ...operations import define

aten = torch.ops.aten


def pool(
    x: Tensor,
    window: list[int],
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> Any:
    """`aten::max_pool2d_with_indices`, or NotImplemented where the windows are others."""
    even = x.dim() == 4 and x.shape[2] % 2 == 0 == x.shape[3] % 2
    if not (even and is_plain(window, stride, padding, dilation, ceil_mode)):
        return NotImplemented
    halves = *x.shape[:2], x.shape[2] // 2, 2, x.shape[3] // 2, 2
    windows = x.reshape(halves)
    (a, b), (c, d) = ([windows[:, :, :, i, :, j] for j in (0, 1)] for i in (0, 1))
    upper, lower = torch.maximum(a, b), torch.maximum(c, d)
    in_lower = lower > upper
    on_right = torch.where(in_lower, d > c, b > a)
    height, width = x.shape[2:]
    down, across = torch.arange(height // 2), torch.arange(width // 2)
    corner = 2 * width * down[:, None] + 2 * across
    place = corner + torch.where(in_lower, width, 0) + torch.where(on_right, 1, 0)
    return torch.maximum(upper, lower), place


def pool_backward(
    dy: Tensor,
    x: Tensor,
    window: list[int],
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil_mode: bool,
    place: Tensor,
) -> Any:
    """Its gradient, by torch's own operation, which is fast."""
    if not is_plain(window, stride, padding, dilation, ceil_mode):
        return NotImplemented
    layout = torch.channels_last if _is_channels_last(x) else torch.contiguous_format
    return torch.ops.fedlamb.pool_backward.default(
        *(t.contiguous(memory_format=layout) for t in (dy, x, place))
    )


def _pool_backward(dy: Tensor, x: Tensor, place: Tensor) -> Tensor:
    two, zero, one = [2, 2], [0, 0], [1, 1]
    found: Tensor = aten.max_pool2d_with_indices_backward.default(
        dy, x, two, two, zero, one, False, place
    )
    return found


define(
    "pool_backward(Tensor dy, Tensor x, Tensor place) -> Tensor",
    _pool_backward,
    lambda dy, x, place: torch.empty_like(x),
)

DECOMPOSITIONS: dict[Any, Any] = {
    aten.max_pool2d_with_indices.default: pool,
    aten.max_pool2d_with_indices_backward.default: pool_backward,
}
"""For `make_fx`."""


def is_plain(
    window: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> bool:
    """Whether windows of 2 × 2 lie side by side; a row or column left over is dropped."""
    return (
        _pair(window) == [2, 2]
        and _pair(stride) in ([], [2, 2])
        and set(_pair(padding)) == {0}
        and set(_pair(dilation)) == {1}
        and not ceil_mode
    )


def _pair(number: Any) -> list[int]:
    return [number, number] if isinstance(number, int) else list(number)


def _is_channels_last(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
