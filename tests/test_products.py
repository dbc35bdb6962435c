"""Large products of matrices on a CPU: in linear layers and in compiled programs."""

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import grad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import skip_init

import fedlamb as fl
from fedlamb.simulate.compiled_loop import program
from fedlamb.simulate.compiled_loop.products import faster_products
from fedlamb.tasks import linear
from fedlamb.tasks.linear import product, with_fast_linear
from fedlamb.tasks.models import build_model
from test_compiled_loop import compiles, whole_numbers

# torch's compiler warns of what it imports itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN")


@pytest.fixture(autouse=True)
def taken_by_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a machine where MKL is faster."""
    monkeypatch.setattr(linear, "_IS_FASTER", torch.backends.mkldnn.is_available())


@onednn
@pytest.mark.parametrize(
    ("processor", "vectors", "faster"),
    [
        ("vendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC", "AVX512", True),
        ("AMD64 Family 25 Model 33 Stepping 0, AuthenticAMD", "AVX512_VNNI", True),
        ("vendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC", "AVX2", False),
        ("vendor_id\t: GenuineIntel\nmodel name\t: Intel(R) Xeon(R)", "AVX512", False),
        ("", "DEFAULT", False),
    ],
)
def test_the_processor_decides(
    processor: str, vectors: str, faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert linear.onednn_is_faster(processor, vectors) is (
        faster and torch.backends.mkl.is_available()
    )
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not linear.onednn_is_faster(processor, vectors)


def layouts(rows: int, columns: int) -> Iterator[Tensor]:
    yield whole_numbers(rows, columns)
    yield whole_numbers(columns, rows).t()
    yield whole_numbers(rows, 2 * columns)[:, ::2]
    yield whole_numbers(rows + 3, columns + 5)[3:, 5:]
    yield whole_numbers(1, columns).expand(rows, columns)
    yield whole_numbers(rows, 1).expand(rows, columns)


@onednn
@pytest.mark.parametrize("sizes", [(48, 30, 77), (1, 200, 60), (70, 1, 160), (33, 65, 1)])
def test_a_product_is_exact_however_its_matrices_lie(sizes: tuple[int, int, int]) -> None:
    rows, inner, columns = sizes
    for a, b in itertools.product(layouts(rows, inner), layouts(inner, columns)):
        biases = whole_numbers(columns), whole_numbers(2 * columns)[::2]
        for added in (None, *biases, *layouts(rows, columns)):
            found = torch.ops.fedlamb.product(a, b, added)
            exact = a.long() @ b.long() + (0 if added is None else added.long())
            assert torch.equal(found.long(), exact)
            assert found.is_contiguous()


@onednn
@pytest.mark.parametrize("added", [None, (200,), (128, 200)])
def test_large_products_are_taken_faster_products(added: Any) -> None:
    def function(a: Tensor, b: Tensor, *more: Tensor) -> Tensor:
        return torch.addmm(*more, a, b) if more else a @ b

    more = [] if added is None else [whole_numbers(*added)]
    given = whole_numbers(128, 64), whole_numbers(64, 200), *more
    graph = faster_products(make_fx(function)(*given))
    assert "fedlamb.product" in graph.code
    assert "aten.mm" not in graph.code
    assert "aten.addmm" not in graph.code
    assert torch.equal(graph(*given), function(*given))


@pytest.mark.parametrize("stop", ["small", "dtype", "column", "scaled", "no oneDNN"])
def test_others_are_left_alone(stop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def function(a: Tensor, b: Tensor, added: Tensor) -> Tensor:
        if stop == "scaled":
            return torch.addmm(added, a, b, beta=2.0)
        return torch.addmm(added, a, b)

    if stop == "no oneDNN":
        monkeypatch.setattr(linear, "_IS_FASTER", False)
    dtype = torch.float64 if stop == "dtype" else torch.float32
    inner = 40 if stop == "small" else 64
    shape = (128, 1) if stop == "column" else (200,)
    shapes = (128, inner), (inner, 200), shape
    given = [whole_numbers(*each, dtype=dtype) for each in shapes]
    graph = faster_products(make_fx(function)(*given))
    assert "fedlamb.product" not in graph.code
    assert torch.equal(graph(*given), function(*given))


@compiles
@onednn
@pytest.mark.parametrize("algorithm", [fl.FedSGD(lr=0.1), fl.FedLAMB(lr=0.01), fl.Mime(lr=1e-4)])
def test_a_wide_network_takes_the_same_steps(
    algorithm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def watched(graph: Any) -> Any:
        seen.append(faster_products(graph).code)
        return graph

    monkeypatch.setattr(program, "faster_products", watched)
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(256, 1, 20, 20, generator=draw), torch.arange(256) % 10
    task = fl.Task(build_model("mlp", (1, 20, 20), 10, hidden=[100]), (x, y), (x, y))
    options: Any = {"clients": fl.iid(256, 2), "rounds": 3, "batch_size": 64, "executor": "loop"}
    one, two = (fl.fit(algorithm, task, compile=compile, **options) for compile in (False, True))
    for plain, compiled in zip(one, two, strict=True):
        assert compiled.metrics == pytest.approx(plain.metrics, rel=1e-4)
    for name, value in one.params.items():
        torch.testing.assert_close(two.params[name], value, rtol=1e-4, atol=1e-6)
    # Of the first layer, forward and for the gradient of its weights.
    steps = [code for code in seen if "nll_loss" in code]
    assert steps
    assert all(code.count("fedlamb.product") == 2 for code in steps)


@onednn
@pytest.mark.parametrize("shape", [(128,), (4, 32), (2, 8, 8)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_is_the_same_forward_and_backward(
    shape: tuple[int, ...], bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    monkeypatch.setattr(linear, "product", lambda *given: taken.append(1) or product(*given))
    plain = skip_init(nn.Linear, 96, 128, bias=bias)
    plain.load_state_dict({n: whole_numbers(*p.shape) for n, p in plain.named_parameters()})
    fast = with_fast_linear(copy.deepcopy(plain))
    found = []
    for layer in (plain, fast):
        x = whole_numbers(*shape, 96).requires_grad_()
        y = layer(x)
        leaves = [x, *layer.parameters()]
        gradients = torch.autograd.grad(y, leaves, whole_numbers(*y.shape), create_graph=True)
        # As a penalty on the gradient has it.
        again = torch.autograd.grad(gradients[0].square().sum() + gradients[1].sum(), leaves[:2])
        found.append([y, *gradients, *again])
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)
    assert len(taken) > 4


@onednn
@pytest.mark.parametrize("case", ["small", "one row", "float64", "autocast", "torch.func"])
def test_other_layers_are_left_to_torch(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "product", None)
    dtype = torch.float64 if case == "float64" else torch.float32
    fast = with_fast_linear(skip_init(nn.Linear, 1024, 1024, dtype=dtype))
    x = whole_numbers(2, 1024, dtype=dtype)
    if case == "small":
        fast, x = with_fast_linear(skip_init(nn.Linear, 16, 4)), x[:, :16]
    if case == "torch.func":
        grad(lambda x: fast(x).sum())(x)
        return
    with torch.autocast("cpu", enabled=case == "autocast"):
        fast(x[0] if case == "one row" else x)


@pytest.mark.parametrize(
    "case", ["width", "bias of one", "bias as a row", "forward mode", "compiled whole"]
)
def test_what_torch_takes_or_refuses_stays_so(case: str) -> None:
    plain = skip_init(nn.Linear, 1024, 1024)
    plain.load_state_dict({n: whole_numbers(*p.shape) for n, p in plain.named_parameters()})
    if case.startswith("bias"):
        shape = (1,) if case == "bias of one" else (1, 1024)
        plain.bias = nn.Parameter(whole_numbers(*shape))
    fast = with_fast_linear(copy.deepcopy(plain))
    x = whole_numbers(2, 1000 if case == "width" else 1024).requires_grad_()
    if case == "width":
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            fast(x)
        return
    if case == "forward mode":
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, x)
            found = [forward_ad.unpack_dual(layer(dual)).tangent for layer in (plain, fast)]
    elif case == "compiled whole":
        whole = torch.compile(fast, fullgraph=True, backend="eager")
        found = [plain(x), whole(x)]
    else:
        found = []
        for layer in (plain, fast):
            found.append(layer(x))
            layer(x).sum().backward()
        assert torch.equal(plain.bias.grad, fast.bias.grad)
    assert torch.equal(*found)


def test_frozen_weights_get_no_gradient_and_the_trained_model_has_plain_layers() -> None:
    model = build_model("mlp", (1, 32, 32), 10, hidden=[64])
    model[1].weight.requires_grad_(False)
    x, y = torch.rand(64, 1, 32, 32, generator=torch.Generator().manual_seed(0)), torch.ones(64)
    task = fl.Task(model, (x, y.long()), (x, y.long()))
    run = fl.fit(fl.FedSGD(lr=0.1), task, clients=[range(64)], rounds=1, batch_size=64)
    next(run)
    assert "1.weight" not in run.params
    assert [type(m) for m in run.model()] == [nn.Flatten, nn.Linear, nn.ReLU, nn.Linear]


class ByType(nn.Module):
    """Asks its layers what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Flatten(), nn.Linear(1024, 64), nn.Linear(64, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = torch.relu(x) if type(layer) is nn.Linear else x
        return x


@pytest.mark.parametrize("executor", ["loop", "vectorised"])
def test_layers_keep_their_class_and_copies_run_themselves(executor: Any) -> None:
    with torch.random.fork_rng():
        model = ByType()
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, 1024, generator=draw), torch.arange(64) % 4
    task = fl.Task(model, (x, y), (x, y))
    run = fl.fit(fl.FedSGD(lr=0.1), task, clients=[range(64)], rounds=2, executor=executor)
    last = list(run)[-1].metrics
    trained = run.model()
    assert nn.functional.cross_entropy(trained(x), y).item() == pytest.approx(last["test_loss"])
    other = copy.deepcopy(task.model)
    with torch.no_grad():
        other.layers[1].weight.zero_()
    assert not torch.equal(other(x), task.model(x))
