"""The convolution of stacked models, alone and with its pool, under vmap, against torch's own."""

import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F  # noqa: N812

from fedlamb.simulate.stacked import layers, products
from fedlamb.simulate.stacked.convolution import Correlation
from fedlamb.simulate.stacked.layers import with_stacked_convolutions
from fedlamb.simulate.stacked.pooled import JoinedPools, pooled
from fedlamb.simulate.stacked.products import with_stacked_products


def ours(x: Tensor, w: Tensor, stride: int, padding: int) -> Tensor:
    return Correlation.apply(x[None], w[None], stride, padding, padding)[0]


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


class Changed(nn.Module):
    """Changes what it is given in place."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(-1)


class Kept(nn.Module):
    """Uses the convolution's result beside the pool, too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return F.max_pool2d(y, 2) + y.mean()


class Frozen(nn.Module):
    """A convolution that is not trained, without a word to the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.conv(x)
        return F.max_pool2d(F.relu(y), 2)


class Hooked(nn.Module):
    """Halves the gradient on its way."""

    def forward(self, x: Tensor) -> Tensor:
        x.register_hook(lambda gradient: gradient / 2)
        return x


class Cut(nn.Module):
    """Lets no gradient through."""

    def forward(self, x: Tensor) -> Tensor:
        return x.detach_()


def conv(padding: int = 0, bias: bool = True) -> nn.Conv2d:
    return nn.Conv2d(2, 3, 3, padding=padding, bias=bias)


MODELS: dict[str, tuple[Any, dict[str, int]]] = {
    # what it is, and how often which operation stands in its program, forward and backward
    "pool": (lambda: [conv(), nn.MaxPool2d(2), nn.ReLU()], {"stacked_pooled": 1}),
    "relu first": (lambda: [conv(bias=False), nn.ReLU(), nn.MaxPool2d(2)], {"stacked_pooled": 1}),
    "relu in place": (  # which keeps the convolution, until the compiler drops the two of them
        lambda: [conv(), nn.ReLU(inplace=True), nn.MaxPool2d(2)],
        {"stacked_pooled": 1, "correlate": 1},
    ),
    "padded": (lambda: [conv(1), nn.MaxPool2d(2, 2)], {"stacked_pooled": 1}),
    "second": (
        lambda: [nn.Tanh(), nn.Conv2d(2, 2, 1), conv(2), nn.MaxPool2d(2)],
        {"stacked_pooled": 1, "correlate_input_gradient": 1, "correlate": 1},
    ),
    "other window": (lambda: [conv(), nn.MaxPool2d(3)], {"correlate": 1}),
    "overlapping": (lambda: [conv(), nn.MaxPool2d(2, 1)], {"correlate": 1}),
    "changed": (lambda: [conv(), Changed(), nn.MaxPool2d(2)], {"correlate": 1}),
    "not followed": (lambda: [Frozen(), nn.Conv2d(3, 2, 1)], {"correlate": 2}),
    "hooked": (lambda: [conv(), Hooked(), nn.MaxPool2d(2)], {"correlate": 1}),
    "cut off": (lambda: [conv(), Cut(), nn.MaxPool2d(2), nn.Conv2d(3, 2, 1)], {"correlate": 2}),
    "tanh between": (lambda: [conv(), nn.Tanh(), nn.MaxPool2d(2)], {"correlate": 1}),
    "strided": (lambda: [nn.Conv2d(2, 3, 3, stride=2), nn.MaxPool2d(2)], {"correlate": 1}),
    "kept": (lambda: [Kept()], {"stacked_pooled": 1, "correlate": 1}),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_pool_joins_its_convolution_where_it_can(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same gradients as torch's, and one operation instead of two."""
    monkeypatch.setattr(layers, "_is_for", lambda layer, input: True)
    build, expected_operations = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(*build()).double()
        x = torch.randn(2, 5, 2, 9, 10, dtype=torch.float64)
        params = {
            n: torch.randn(2, *p.shape, dtype=torch.float64) for n, p in model.named_parameters()
        }

    def gradients_of(model: nn.Module) -> Any:
        def loss(params: Any, x: Tensor) -> Tensor:
            return functional_call(model, params, (x.clone(),)).square().sum()

        return vmap(grad(loss))

    expected = gradients_of(model)(params, x)
    stacked = gradients_of(with_stacked_convolutions(model))
    with JoinedPools():
        program = make_fx(stacked)(params, x)
    program.graph.eliminate_dead_code()
    program.recompile()
    found = program(params, x)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-10)
    kinds = Counter(
        node.target._schema.name.removeprefix("fedlamb::")
        for node in program.graph.nodes
        if "fedlamb" in str(node.target)
    )
    assert {n: kinds[n] for n in ("stacked_pooled", "correlate")} == {
        n: expected_operations.get(n, 0) for n in ("stacked_pooled", "correlate")
    }
    assert kinds["correlate_input_gradient"] >= expected_operations.get(
        "correlate_input_gradient", 0
    )


def test_the_first_of_equals_is_the_largest_and_no_number_goes_through() -> None:
    x = torch.tensor([[1.0, 1.0, 0.0, 2.0], [1.0, 1.0, 2.0, float("nan")]])
    values, places = pooled(x[None, None, :, :, None], torch.ones(1, 1, 1, 1, 1), 0, 0)
    assert values.flatten()[0] == 1
    assert values.flatten()[1].isnan()
    assert places.flatten().tolist() == [0, 3]


KERNELS = """
import contextlib, torch
from torch.nn import functional as F
from fedlamb.simulate.stacked import convolution_kernels as kernels, product_kernels

torch.cuda.device_of = lambda tensor: contextlib.nullcontext()
torch.manual_seed(0)

def check(found, expected):
    gap, size = (t.detach().abs().max() for t in (found - expected, expected))
    assert gap / size < 1e-5, (found, expected)  # which NaN is not

def last(t):
    return t.detach().movedim(2, 4).contiguous()

for n, c, h, w, o, kernel, stride, padding in (
    (5, 1, 12, 12, 10, (5, 5), 1, (0, 0)), (5, 10, 8, 8, 20, (5, 5), 1, (0, 0)),
    (3, 20, 9, 8, 40, (3, 2), 2, (0, 0)), (2, 3, 7, 7, 17, (3, 3), 1, (1, 1)),
    (2, 4, 7, 6, 17, (3, 3), 2, (1, 0)), (2, 2, 7, 9, 70, (1, 1), 1, (0, 0)),
):
    x = torch.randn(3, n, c, h, w, requires_grad=True)
    k = torch.randn(3, o, c, *kernel, requires_grad=True)
    y = torch.stack([F.conv2d(a, b, stride=stride, padding=padding) for a, b in zip(x, k)])
    dy = torch.randn_like(y)
    y.backward(dy)
    check(kernels.correlate(last(x), k.detach(), stride, padding), last(y))
    check(kernels.weight_gradient(last(x), last(dy), kernel, stride, padding), k.grad)
    if stride > 1:
        continue
    check(kernels.input_gradient(last(dy), k.detach(), padding), last(x.grad))
    if o > 32:
        continue
    x.grad = k.grad = None
    y = torch.stack([F.max_pool2d(F.conv2d(a, b, padding=padding), 2) for a, b in zip(x, k)])
    dy = torch.randn_like(y)
    y.backward(dy)
    found, places = kernels.pooled(last(x), k.detach(), padding)
    check(found, last(y))
    check(kernels.pooled_weight_gradient(last(x), last(dy), places, kernel, padding), k.grad)
for m, k, n in ((20, 70, 33), (3, 5, 100), (70, 8, 9)):
    for a in (torch.randn(2, k, m).mT, torch.randn(2, m, k)):
        for b in (torch.randn(2, k, n), torch.randn(2, n, k).mT):
            check(product_kernels.product(a, b), a @ b)
x, k = torch.ones(1, 2, 6, 6, 1), torch.randint(-3, 3, (1, 3, 1, 3, 3)).float()
assert not kernels.pooled(x, k, (0, 0))[1].any()  # the first of equals
"""


def test_the_kernels_by_tritons_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton's kernels need Triton, on a CPU its interpreter")
    command = [sys.executable, "-c", KERNELS]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_products_of_stacked_matrices_are_taken_by_their_kernel_where_it_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(3, 5, 4, generator=draw), torch.randn(3, 4, 6, generator=draw)
    program = with_stacked_products(make_fx(torch.bmm)(a, b))
    assert torch.equal(program(a, b), a @ b)  # of a CPU, it fits none
    monkeypatch.setattr(products, "_fits", lambda matrices: True)
    program = with_stacked_products(make_fx(torch.bmm)(a, b))
    targets = [node.target for node in program.graph.nodes]
    assert torch.ops.fedlamb.stacked_product.default in targets
    assert torch.ops.aten.bmm.default not in targets
    assert products._shape(a, b).shape == (3, 5, 6)
