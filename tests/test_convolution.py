"""The convolution of stacked models: its gradients, under vmap, against torch's own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional as F  # noqa: N812

from fedlamb.simulate.convolution import _Correlation, with_stacked_convolutions


def ours(x: Tensor, w: Tensor, stride: int, padding: int) -> Tensor:
    return _Correlation.apply(F.pad(x, (padding,) * 4)[None], w[None], stride)[0]


def torchs(x: Tensor, w: Tensor, stride: int, padding: int) -> Tensor:
    return F.conv2d(x, w, stride=stride, padding=padding)


def gradients(convolve: Any, stride: int, padding: int) -> Any:
    """By the weights of two layers, so that the gradient goes through images as well."""

    def one(x: Tensor, first: Tensor, second: Tensor) -> Any:
        def loss(weights: Any) -> Tensor:
            hidden = torch.tanh(convolve(x, weights[0], 1, 0))
            return convolve(hidden, weights[1], stride, padding).square().sum()

        return grad(loss)((first, second))

    return one


@pytest.mark.parametrize(("stride", "padding"), [(1, 0), (1, 1), (2, 1), (2, 0), (3, 2)])
def test_stacked_convolution_has_the_gradients_of_torchs(stride: int, padding: int) -> None:
    draw = torch.Generator().manual_seed(stride)
    x, first, second = (
        torch.randn(2, 3, *shape, generator=draw, dtype=torch.float64)
        for shape in ((4, 2, 9, 11), (5, 2, 3, 2), (7, 5, 3, 3))
    )
    for second_of in (0, None):  # as one tensor for each model, and as one for all
        arguments = (x, first, second if second_of == 0 else second[:, 0])

        def mapped(function: Any, dims: Any = (0, 0, second_of)) -> Any:
            return vmap(vmap(function, in_dims=dims))

        found = mapped(gradients(ours, stride, padding))(*arguments)
        expected = mapped(gradients(torchs, stride, padding))(*arguments)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_a_stacked_convolution_on_a_cpu_is_torchs() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 8, 8, generator=draw)
    with torch.random.fork_rng():
        model = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.Conv2d(4, 4, 3, groups=2))
    expected = model(x)
    assert all(type(m) is nn.Conv2d for m in with_stacked_convolutions(model))
    assert all("forward" in vars(m) for m in model)
    assert torch.equal(model(x), expected)
