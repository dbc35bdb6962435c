"""Convolution for many small models at once.

cuDNN runs a convolution over stacked models as a grouped one, far from what a GPU can do. Here it
is an operation of its own, with the models as one more axis of images and weights.
"""

from importlib.util import find_spec
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn import grad as gradients
from torch.nn.functional import pad


def with_stacked_convolutions(model: nn.Module) -> nn.Module:
    """The same module with convolutions that are fast under vmap on a GPU, the same numbers to
    rounding; changes it in place, but not the class of its layers."""
    for module in model.modules():
        if type(module) is nn.Conv2d and "forward" not in vars(module):
            vars(module)["forward"] = MethodType(_forward, module)
    return model


def _forward(self: nn.Conv2d, input: Tensor) -> Tensor:
    if not _is_for(self, input):
        return nn.Conv2d.forward(self, input)
    padding: Any = self.padding
    if any(padding):
        input = pad(input, (padding[1], padding[1], padding[0], padding[0]))
    found: Tensor = _Correlation.apply(input[None], self.weight[None], self.stride[0])[0]
    return found if self.bias is None else found + self.bias[:, None, None]


def _is_for(layer: nn.Conv2d, input: Tensor) -> bool:
    return (
        input.is_cuda
        and find_spec("triton") is not None
        and input.dtype == torch.float32 == layer.weight.dtype
        and not torch.is_autocast_enabled("cuda")
        and not isinstance(layer.padding, str)
        and layer.padding_mode == "zeros"
        and layer.groups == 1
        and set(layer.dilation) == {1}
        and len(set(layer.stride)) == 1
    )


@torch.library.custom_op("fedlamb::correlate", mutates_args=())
def correlate(x: Tensor, w: Tensor, stride: int) -> Tensor:
    """x (models, images, channels, height, width) with w (models, outputs, channels, ...)."""
    found = [F.conv2d(*pair, stride=stride) for pair in zip(x, w, strict=True)]
    return torch.stack(found)


@torch.library.custom_op("fedlamb::correlate_weight_gradient", mutates_args=())
def weight_gradient(x: Tensor, dy: Tensor, down: int, across: int, stride: int) -> Tensor:
    """The gradient of `correlate` by w, for windows of this height and width."""
    size = (dy.shape[2], x.shape[2], down, across)
    by_w: Any = gradients.conv2d_weight
    return torch.stack([by_w(a, size, b, stride) for a, b in zip(x, dy, strict=True)])


@correlate.register_fake
def _(x: Tensor, w: Tensor, stride: int) -> Tensor:
    down, across = ((a - b) // stride + 1 for a, b in zip(x.shape[3:], w.shape[3:], strict=True))
    return x.new_empty((*x.shape[:2], w.shape[1], down, across))


@weight_gradient.register_fake
def _(x: Tensor, dy: Tensor, down: int, across: int, stride: int) -> Tensor:
    return dy.new_empty((dy.shape[0], dy.shape[2], x.shape[2], down, across))


@correlate.register_kernel("cuda")
def _(x: Tensor, w: Tensor, stride: int) -> Tensor:
    from . import convolution_kernels as kernels

    return kernels.correlate(x.contiguous(), w.contiguous(), stride)


@weight_gradient.register_kernel("cuda")
def _(x: Tensor, dy: Tensor, down: int, across: int, stride: int) -> Tensor:
    from . import convolution_kernels as kernels

    return kernels.weight_gradient(x.contiguous(), dy.contiguous(), (down, across), stride)


def input_gradient(dy: Tensor, w: Tensor, height: int, width: int, stride: int) -> Tensor:
    """The gradient of `correlate` by x, for images of this size: a correlation, too."""
    down, across = w.shape[3:]
    if stride > 1:
        apart = dy.new_zeros((*dy.shape[:3], height - down + 1, width - across + 1))
        apart[..., ::stride, ::stride] = dy
        dy = apart
    around = pad(dy, (across - 1, across - 1, down - 1, down - 1))
    found: Tensor = correlate(around, w.flip(3, 4).transpose(1, 2).contiguous(), 1)
    return found


class _Stacked(torch.autograd.Function):
    """A function of tensors whose first axis are the models; under vmap there are more models."""

    @classmethod
    def folded(cls, info: Any, in_dims: Any, *arguments: Any) -> tuple[Tensor, int]:
        """The batched axis becomes part of the models' axis, and comes back afterwards."""

        def fold(argument: Any, dim: int | None) -> Any:
            if not isinstance(argument, Tensor):
                return argument
            if dim is None:
                return argument.expand(info.batch_size, *argument.shape).flatten(0, 1)
            return argument.movedim(dim, 0).flatten(0, 1)

        found: Any = cls.apply(*map(fold, arguments, in_dims))
        return found.unflatten(0, (info.batch_size, -1)), 0


class _Correlation(_Stacked):
    @staticmethod
    def forward(x: Tensor, w: Tensor, stride: int) -> Any:
        return correlate(x, w, stride)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, w, ctx.stride = inputs
        ctx.save_for_backward(x, w)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, w = ctx.saved_tensors
        by_x, by_w = ctx.needs_input_grad[:2]
        dx = _InputGradient.apply(dy, w, *x.shape[3:], ctx.stride) if by_x else None
        dw = _WeightGradient.apply(x, dy, *w.shape[3:], ctx.stride) if by_w else None
        return dx, dw, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> tuple[Tensor, int]:
        return _Correlation.folded(info, in_dims, *arguments)


class _InputGradient(_Stacked):
    @staticmethod
    def forward(dy: Tensor, w: Tensor, height: int, width: int, stride: int) -> Any:
        return input_gradient(dy, w, height, width, stride)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        """Nothing: this is never differentiated again."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> tuple[Tensor, int]:
        return _InputGradient.folded(info, in_dims, *arguments)


class _WeightGradient(_Stacked):
    @staticmethod
    def forward(x: Tensor, dy: Tensor, down: int, across: int, stride: int) -> Any:
        return weight_gradient(x, dy, down, across, stride)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        """Nothing: this is never differentiated again."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> tuple[Tensor, int]:
        return _WeightGradient.folded(info, in_dims, *arguments)
