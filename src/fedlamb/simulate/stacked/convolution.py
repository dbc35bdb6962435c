"""The convolution of stacked models as an operation, and its gradients.

Images have the shape (models, images, height, width, channels), weights (models, outputs, inputs,
height, width).
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.nn import grad as gradients


@torch.library.custom_op("fedlamb::correlate", mutates_args=())
def correlate(x: Tensor, w: Tensor, stride: int, top: int, left: int) -> Tensor:
    """x with w, model by model."""
    pairs = zip(as_torch_has_them(x), w, strict=True)
    return channels_last(torch.stack([F.conv2d(*p, None, stride, (top, left)) for p in pairs]))


@torch.library.custom_op("fedlamb::correlate_input_gradient", mutates_args=())
def input_gradient(dy: Tensor, w: Tensor, top: int, left: int) -> Tensor:
    """The gradient of `correlate` by x, where the stride is 1."""
    down, across = _sides_before(dy, w, top, left)
    pairs = zip(as_torch_has_them(dy), w, strict=True)
    by_x: Any = gradients.conv2d_input
    found = [by_x((len(a), b.shape[1], down, across), b, a, 1, (top, left)) for a, b in pairs]
    return channels_last(torch.stack(found))


@torch.library.custom_op("fedlamb::correlate_weight_gradient", mutates_args=())
def weight_gradient(
    x: Tensor, dy: Tensor, down: int, across: int, stride: int, top: int, left: int
) -> Tensor:
    """The gradient of `correlate` by w, for windows of this height and width."""
    size = (dy.shape[4], x.shape[4], down, across)
    pairs = zip(as_torch_has_them(x), as_torch_has_them(dy), strict=True)
    by_w: Any = gradients.conv2d_weight
    return torch.stack([by_w(a, size, b, stride, (top, left)) for a, b in pairs])


def channels_last(x: Tensor) -> Tensor:
    """Images of stacked models as torch has them, laid out as they are here."""
    return x.movedim(2, 4).contiguous()


def as_torch_has_them(x: Tensor) -> Tensor:
    """The way back."""
    return x.movedim(4, 2)


def _sides_before(dy: Tensor, w: Tensor, top: int, left: int) -> tuple[int, int]:
    return dy.shape[2] + w.shape[3] - 1 - 2 * top, dy.shape[3] + w.shape[4] - 1 - 2 * left


@correlate.register_fake
def _(x: Tensor, w: Tensor, stride: int, top: int, left: int) -> Tensor:
    down = (x.shape[2] + 2 * top - w.shape[3]) // stride + 1
    across = (x.shape[3] + 2 * left - w.shape[4]) // stride + 1
    return x.new_empty((*x.shape[:2], down, across, w.shape[1]))


@input_gradient.register_fake
def _(dy: Tensor, w: Tensor, top: int, left: int) -> Tensor:
    return dy.new_empty((*dy.shape[:2], *_sides_before(dy, w, top, left), w.shape[2]))


@weight_gradient.register_fake
def _(x: Tensor, dy: Tensor, down: int, across: int, stride: int, top: int, left: int) -> Tensor:
    return dy.new_empty((dy.shape[0], dy.shape[4], x.shape[4], down, across))


@correlate.register_kernel("cuda")
def _(x: Tensor, w: Tensor, stride: int, top: int, left: int) -> Tensor:
    from . import convolution_kernels as kernels

    return kernels.correlate(x.contiguous(), w.contiguous(), stride, (top, left))


@input_gradient.register_kernel("cuda")
def _(dy: Tensor, w: Tensor, top: int, left: int) -> Tensor:
    from . import convolution_kernels as kernels

    return kernels.input_gradient(dy.contiguous(), w.contiguous(), (top, left))


@weight_gradient.register_kernel("cuda")
def _(x: Tensor, dy: Tensor, down: int, across: int, stride: int, top: int, left: int) -> Tensor:
    from . import convolution_kernels as kernels

    return kernels.weight_gradient(
        x.contiguous(), dy.contiguous(), (down, across), stride, (top, left)
    )


class OfModels(torch.autograd.Function):
    """A function of tensors whose first axis are the models; under vmap there are more models."""

    @classmethod
    def folded(cls, info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
        """The batched axis becomes part of the models' axis, and comes back afterwards."""

        def fold(argument: Any, dim: int | None) -> Any:
            if not isinstance(argument, Tensor):
                return argument
            if dim is None:
                return argument.expand(info.batch_size, *argument.shape).flatten(0, 1)
            return argument.movedim(dim, 0).flatten(0, 1)

        found: Any = cls.apply(*map(fold, arguments, in_dims))
        if isinstance(found, Tensor):
            return found.unflatten(0, (info.batch_size, -1)), 0
        return tuple(each.unflatten(0, (info.batch_size, -1)) for each in found), (0,) * len(found)


class Correlation(OfModels):
    """x with w, both as torch has them but for the models."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, stride: int, top: int, left: int) -> Any:
        found = correlate(channels_last(x), w.contiguous(), stride, top, left)
        return as_torch_has_them(found)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, w, *ctx.numbers = inputs
        ctx.save_for_backward(x, w)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, w = ctx.saved_tensors
        by_x, by_w = ctx.needs_input_grad[:2]
        dx = InputGradient.apply(dy, w, *x.shape[3:], *ctx.numbers) if by_x else None
        dw = WeightGradient.apply(x, dy, *w.shape[3:], *ctx.numbers) if by_w else None
        return dx, dw, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return Correlation.folded(info, in_dims, *arguments)


class InputGradient(OfModels):
    """The gradient of a correlation by its images, for images of this size."""

    @staticmethod
    def forward(
        dy: Tensor, w: Tensor, height: int, width: int, stride: int, top: int, left: int
    ) -> Any:
        if stride > 1:  # the same as with stride 1 and zeros in between
            down, across = height + 2 * top - w.shape[3] + 1, width + 2 * left - w.shape[4] + 1
            apart = dy.new_zeros((*dy.shape[:3], down, across))
            apart[..., ::stride, ::stride] = dy
            dy = apart
        return as_torch_has_them(input_gradient(channels_last(dy), w.contiguous(), top, left))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        """Nothing: this is never differentiated again."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return InputGradient.folded(info, in_dims, *arguments)


class WeightGradient(OfModels):
    """The gradient of a correlation by its weights, for windows of this height and width."""

    @staticmethod
    def forward(
        x: Tensor, dy: Tensor, down: int, across: int, stride: int, top: int, left: int
    ) -> Any:
        return weight_gradient(channels_last(x), channels_last(dy), down, across, stride, top, left)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        """Nothing: this is never differentiated again."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return WeightGradient.folded(info, in_dims, *arguments)
