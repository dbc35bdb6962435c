"""A convolution and the 2 × 2 max-pooling behind it as one operation.

Between the two lies the largest tensor of a small network, of which pooling drops three quarters.
Made together it is never written, and the gradient of the weights needs only what was kept.
"""

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn import grad as gradients
from torch.overrides import TorchFunctionMode

from ..compiled_loop.pooling import is_plain
from .convolution import InputGradient, OfModels, as_torch_has_them, channels_last

_CHANNELS, _OUTPUTS, _KERNEL = 4, 32, 7  # at most: with more, another layout would be faster


class JoinedPools(TorchFunctionMode):
    """While programs are traced: a pool behind a stacked convolution, or behind its ReLU, becomes
    one operation with it. The convolution that is then of no use is left to the compiler to drop.
    """

    _tracing: "list[JoinedPools]" = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, _Made] = {}

    def __enter__(self) -> Self:
        self._tracing.append(self)
        entered: Self = super().__enter__()
        return entered

    def __exit__(self, *error: Any) -> None:
        self._tracing.pop()
        super().__exit__(*error)

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        keywords = keywords or {}
        made = self._of(arguments[0]) if arguments else None
        if made is not None and function in _CUTS:
            del self._made[id(made.result)]
            made = None
        if made is not None and function in _POOLS and _joins(*arguments, **keywords):
            return made.pooled()
        found = function(*arguments, **keywords)
        if made is not None and function in _RELUS:
            versions = _versions(found, *made.parts)
            self.keep(made._replace(result=found, versions=versions, relu=True))
        return found

    def keep(self, made: "_Made") -> None:
        """What a result was made of; with the result itself, so that no other takes its place."""
        self._made[id(made.result)] = made

    def _of(self, result: Any) -> "_Made | None":
        made = self._made.get(id(result))
        return made if made is not None and made.holds else None


def note(result: Tensor, layer: nn.Conv2d, input: Tensor) -> None:
    """That this is the layer's result, where pools are being joined."""
    few = layer.in_channels <= _CHANNELS and layer.out_channels <= _OUTPUTS
    small = few and max(layer.kernel_size) <= _KERNEL
    if JoinedPools._tracing and small and set(layer.stride) == {1}:
        parts = [input, layer.weight, *([] if layer.bias is None else [layer.bias])]
        versions, followed = _versions(result, *parts), torch.is_grad_enabled()
        made = _Made(result, versions, input, layer.weight, layer.bias, layer.padding, followed)
        JoinedPools._tracing[-1].keep(made)


class _Made(NamedTuple):
    """How a result was made."""

    result: Tensor
    versions: list[int]
    """Of the result and its parts, before anybody changed them in place."""
    input: Tensor
    weight: Tensor
    bias: Tensor | None
    padding: Any
    followed: bool
    """Whether gradients flow through it."""
    relu: bool = False

    @property
    def parts(self) -> list[Tensor]:
        """What it was made of."""
        return [self.input, self.weight, *([] if self.bias is None else [self.bias])]

    @property
    def holds(self) -> bool:
        """Whether to make it again, now, would give the same with the same gradients."""
        same = self.versions == _versions(self.result, *self.parts)
        return same and self.followed == torch.is_grad_enabled()

    def pooled(self) -> Tensor:
        """The pool of the result, made without it."""
        found: Tensor = _Pooled.apply(self.input[None], self.weight[None], *self.padding)[0][0]
        found = found if self.bias is None else found + self.bias[:, None, None]
        return F.relu(found) if self.relu else found


def _versions(*tensors: Tensor) -> list[int]:
    return [tensor._version for tensor in tensors]


_CUTS: tuple[Any, ...] = (
    Tensor.detach_, Tensor.requires_grad_, Tensor.register_hook, Tensor.data.__get__,  # type: ignore[attr-defined]
    Tensor.data.__set__,  # type: ignore[attr-defined]
)  # fmt: skip
"""After these, what a result holds or hands back may be another thing than what made it."""
_POOLS: tuple[Any, ...] = (torch.max_pool2d, F.max_pool2d)
_RELUS: tuple[Any, ...] = (F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_)


def _joins(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> bool:
    stride = () if stride is None else stride
    enough = min(input.shape[2:]) > 1
    return (
        enough
        and is_plain(kernel_size, stride, padding, dilation, ceil_mode)
        and not return_indices
    )


@torch.library.custom_op("fedlamb::stacked_pooled", mutates_args=())
def pooled(x: Tensor, w: Tensor, top: int, left: int) -> tuple[Tensor, Tensor]:
    """The largest of each 2 × 2 pixels of `correlate`, and which of the four it is."""
    pairs = zip(as_torch_has_them(x), w, strict=True)
    after = torch.stack([F.conv2d(*pair, None, 1, (top, left)) for pair in pairs])
    corners = [after[..., i::2, j::2] for i in (0, 1) for j in (0, 1)]
    down, across = corners[3].shape[3:]
    best = torch.stack([each[..., :down, :across] for each in corners]).max(dim=0)
    return channels_last(best.values), channels_last(best.indices.to(torch.uint8))


@torch.library.custom_op("fedlamb::stacked_pooled_weight_gradient", mutates_args=())
def weight_gradient(
    x: Tensor, dy: Tensor, places: Tensor, down: int, across: int, top: int, left: int
) -> Tensor:
    """The gradient of `pooled` by w, for windows of this height and width."""
    height, width = _sides_between(x, down, across, top, left)
    spread = _spread(as_torch_has_them(dy), as_torch_has_them(places), height, width)
    size = (dy.shape[4], x.shape[4], down, across)
    pairs = zip(as_torch_has_them(x), spread, strict=True)
    by_w: Any = gradients.conv2d_weight
    return torch.stack([by_w(a, size, b, 1, (top, left)) for a, b in pairs])


def _sides_between(x: Tensor, down: int, across: int, top: int, left: int) -> tuple[int, int]:
    """Of an image between the convolution and the pool."""
    return x.shape[2] + 2 * top - down + 1, x.shape[3] + 2 * left - across + 1


def _spread(dy: Tensor, places: Tensor, height: int, width: int) -> Tensor:
    """A pool's gradient at the pixels where it was largest, zeros elsewhere."""
    found = dy.new_zeros((*dy.shape[:3], height, width))
    down, across = (2 * side for side in dy.shape[3:])
    for number, (i, j) in enumerate(((0, 0), (0, 1), (1, 0), (1, 1))):
        found[..., i:down:2, j:across:2] = torch.where(places == number, dy, 0)
    return found


@pooled.register_fake
def _(x: Tensor, w: Tensor, top: int, left: int) -> tuple[Tensor, Tensor]:
    height, width = _sides_between(x, w.shape[3], w.shape[4], top, left)
    found = x.new_empty((*x.shape[:2], height // 2, width // 2, w.shape[1]))
    return found, torch.empty_like(found, dtype=torch.uint8)


@weight_gradient.register_fake
def _(x: Tensor, dy: Tensor, places: Tensor, down: int, across: int, top: int, left: int) -> Tensor:
    return dy.new_empty((dy.shape[0], dy.shape[4], x.shape[4], down, across))


@pooled.register_kernel("cuda")
def _(x: Tensor, w: Tensor, top: int, left: int) -> tuple[Tensor, Tensor]:
    from . import convolution_kernels as kernels

    return kernels.pooled(x.contiguous(), w.contiguous(), (top, left))


@weight_gradient.register_kernel("cuda")
def _(x: Tensor, dy: Tensor, places: Tensor, down: int, across: int, top: int, left: int) -> Tensor:
    from . import convolution_kernels as kernels

    images, gradient, kept = (t.contiguous() for t in (x, dy, places))
    return kernels.pooled_weight_gradient(images, gradient, kept, (down, across), (top, left))


class _Pooled(OfModels):
    @staticmethod
    def forward(x: Tensor, w: Tensor, top: int, left: int) -> Any:
        found = pooled(channels_last(x), w.contiguous(), top, left)
        return tuple(as_torch_has_them(each) for each in found)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, w, *ctx.padding = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, w, output[1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Any) -> Any:
        x, w, places = ctx.saved_tensors
        by_x, by_w = ctx.needs_input_grad[:2]
        dx = _PooledInputGradient.apply(dy, places, w, *x.shape[3:], *ctx.padding) if by_x else None
        dw = (
            _PooledWeightGradient.apply(x, dy, places, *w.shape[3:], *ctx.padding) if by_w else None
        )
        return dx, dw, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return _Pooled.folded(info, in_dims, *arguments)


class _PooledInputGradient(OfModels):
    @staticmethod
    def forward(
        dy: Tensor, places: Tensor, w: Tensor, height: int, width: int, top: int, left: int
    ) -> Any:
        sides = height + 2 * top - w.shape[3] + 1, width + 2 * left - w.shape[4] + 1
        spread = _spread(dy, places, *sides)
        return InputGradient.forward(spread, w, height, width, 1, top, left)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        """Nothing: this is never differentiated again."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return _PooledInputGradient.folded(info, in_dims, *arguments)


class _PooledWeightGradient(OfModels):
    @staticmethod
    def forward(
        x: Tensor, dy: Tensor, places: Tensor, down: int, across: int, top: int, left: int
    ) -> Any:
        given = (channels_last(t) for t in (x, dy, places))
        return weight_gradient(*given, down, across, top, left)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        """Nothing: this is never differentiated again."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return _PooledWeightGradient.folded(info, in_dims, *arguments)
