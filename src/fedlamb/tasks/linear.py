"""Linear layers whose large products of float32 matrices are taken by oneDNN where that is faster.

torch multiplies such matrices by MKL. On an AMD EPYC with AVX-512, oneDNN, which torch carries for
convolutions, takes half of the time; on an Intel Xeon with AVX-512 it takes longer than MKL
(`benchmarks/peers/floor.py` times both). The processor and the sizes alone decide which of them
multiplies, so the same machine always gives the same bits.
"""

import platform
from math import prod
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from ..operations import define

_LARGE = 2**20  # multiplications; with fewer, the longer way into oneDNN costs more than it saves


def _processor() -> str:
    """What the system tells of it, its maker among other things."""
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()


def onednn_is_faster(processor: str, vectors: str) -> bool:
    """Whether it is with this processor and vectors as torch names them, such as AVX512."""
    there: bool = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
    return there and "AuthenticAMD" in processor and vectors.startswith("AVX512")


_IS_FASTER = onednn_is_faster(_processor(), torch.backends.cpu.get_cpu_capability())


def by_onednn(dtype: torch.dtype, *sizes: int) -> bool:
    """Whether a product is taken so; the sizes are its rows, columns and what is summed."""
    return _IS_FASTER and dtype == torch.float32 and prod(sizes) >= _LARGE


def _product(a: Tensor, b: Tensor, added: Tensor | None = None) -> Tensor:
    linear: Any = torch.ops.mkldnn._linear_pointwise
    if added is not None:
        added = added.contiguous()  # of a bias, strides would be overlooked
    if added is None or added.dim() == 1:
        found: Tensor = linear.default(a, b.t(), added, "none", [], "")
    else:
        found = linear.binary(a, added, b.t(), None, "add")
    return found


def _shape(a: Tensor, b: Tensor, added: Tensor | None = None) -> Tensor:
    return a.new_empty(len(a), b.shape[1])


_SCHEMA = "product(Tensor a, Tensor b, Tensor? added=None) -> Tensor"
define(_SCHEMA, _product, _shape, any_layout=True)
product = torch.ops.fedlamb.product.default
"""A B, or A B + a bias, or A B + C, by oneDNN."""


def with_fast_linear(model: nn.Module) -> nn.Module:
    """The same module with its linear layers run so; changes it in place, but not their class."""
    for module in model.modules():
        plain = type(module) is nn.Linear and "forward" not in vars(module)
        if plain and module.weight.device.type == "cpu":
            vars(module)["forward"] = MethodType(_forward, module)
    return model


def _forward(self: nn.Linear, input: Tensor) -> Tensor:
    if not _is_for(self, input):
        return nn.Linear.forward(self, input)
    found: Tensor = _Linear.apply(input.flatten(0, -2), self.weight, self.bias)
    return found.reshape(*input.shape[:-1], -1)


def _is_for(layer: nn.Linear, input: Tensor) -> bool:
    shapes = [layer.weight.shape, *([] if layer.bias is None else [layer.bias.shape])]
    outputs = layer.out_features
    return (
        by_onednn(input.dtype, input.numel(), outputs)
        and input.device.type == "cpu"
        and input.layout == torch.strided
        and not input.is_nested
        and input.dim() > 1
        and layer.weight.dtype == input.dtype
        and shapes == [(outputs, input.shape[-1]), (outputs,)][: len(shapes)]
        and not torch.is_autocast_enabled("cpu")
        and torch._C._functorch.maybe_current_level() is None  # torch.func has rules of its own
        and forward_ad._current_level < 0  # and so has forward mode
    )


class _Linear(torch.autograd.Function):
    """x Wᵀ + bias; its gradients are of the same form, so that they have gradients as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        ctx.save_for_backward(x, weight)
        return product(x, weight.t(), bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        by_x, by_weight, by_bias = ctx.needs_input_grad
        return (
            _Linear.apply(dy, weight.t(), None) if by_x else None,
            _Linear.apply(dy.t(), x.t(), None) if by_weight else None,
            dy.sum(0) if by_bias else None,
        )
