"""Local steps and test passes as compiled programs give what plain ones give."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F  # noqa: N812

import fedlamb as fl
from fedlamb.plan import Plan
from fedlamb.simulate.compiled_loop import program
from fedlamb.simulate.compiled_loop.outputs import CompiledOutputs
from fedlamb.simulate.compiled_loop.pooled_convolution import joined
from fedlamb.simulate.compiled_loop.pooling import DECOMPOSITIONS
from fedlamb.simulate.compiled_loop.sizes import Sizes
from fedlamb.simulate.compiled_loop.updates import inside_products
from fedlamb.simulate.loop import Autograd
from fedlamb.tasks.images import Batch
from fedlamb.tasks.models import build_model
from fedlamb.tasks.partition import PerRound, Rows
from problems import Small
from test_executors import METHODS

# torch's compiler warns of what it imports itself.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
compiles = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to compile")


def assert_same(algorithm: Any, task: fl.Task, rounds: int, **options: Any) -> None:
    one, two = (
        fl.fit(algorithm, task, rounds=rounds, executor="loop", compile=compile, **options)
        for compile in (False, True)
    )
    for plain, compiled in zip(one, two, strict=True):
        assert compiled.metrics == pytest.approx(plain.metrics, rel=1e-9, abs=1e-9)
    for name, value in one.params.items():
        torch.testing.assert_close(two.params[name], value, rtol=1e-9, atol=1e-9)


@compiles
@pytest.mark.parametrize("name", METHODS)
def test_each_method_takes_the_same_steps(name: str) -> None:
    small = Small(sizes=(6, 6, 9, 6))
    assert_same(METHODS[name], small.task(), 3, clients=small.clients(), batch_size=3)


@compiles
def test_of_many_sizes_of_batches_only_some_are_compiled() -> None:
    small = Small(sizes=(1, 2, 3, 4, 5, 6))
    options = {"clients": small.clients(), "batch_size": 6}
    assert_same(fl.FedSGD(lr=0.1), small.task(), 2, **options)
    run = fl.fit(
        fl.FedSGD(lr=0.1), small.task(), rounds=1, executor="loop", compile=True, **options
    )
    next(run)
    (sizes,) = run._executor._compiled._programs.values()
    assert set(sizes) == {3, 4, 5, 6}


def test_what_worked_with_this_compiler_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    fails, known = [RuntimeError("no")], list[Any]()

    def compile(graph: Any, examples: Any) -> Any:
        known.append(torch._inductor.config.cpp.vec_isa_ok)
        if fails:
            raise fails.pop()
        return graph

    monkeypatch.setattr(torch._inductor, "compile", compile)
    takes = [False, True]
    monkeypatch.setattr(program, "_takes_all_registers", lambda: takes.pop(0))

    def doubled() -> Any:
        return program.compiled(lambda x: [2 * x], [torch.ones(3)], "a product")

    with pytest.raises(fl.SettingError, match="does not work here"):
        doubled()
    for _ in range(3):
        (found,) = doubled()(torch.ones(3))
        assert found.tolist() == [2, 2, 2]
    assert known == [None, None, None, True]  # as torch has it until all of it worked
    assert torch._inductor.config.cpp.vec_isa_ok is None
    monkeypatch.setenv("CXX", "another")
    takes.append(False)
    doubled()
    assert known[-1] is None


@compiles
def test_all_registers_that_the_processor_has_are_known_to_work_here() -> None:
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list

    every = valid_vec_isa_list()
    assert program._takes_all_registers()
    assert valid_vec_isa_list() == every


def test_the_most_frequent_sizes_are_compiled_whichever_come_first() -> None:
    def sizes(*counts: int, batch_size: int = 8) -> Sizes:
        rows = Rows.of([np.zeros(count, dtype=np.int64) for count in counts])
        return Sizes.of(Plan(rows, fraction=0.1, batch_size=batch_size, epochs=2, seed=0))

    assert sizes(*[19] * 100) == ({8, 3}, {19})
    assert sizes(17, *[24] * 100).steps == {8}  # the one of 1 is rare
    assert sizes(*[800] * 100).steps == {8}
    assert sizes(3, 5, 5, 4, 1, 2).steps == {5, 4, 3, 2}
    assert sizes(*[1200] * 10, batch_size=128) == ({128, 48}, {600})
    assert sizes(*[2049] * 10).full == {683}
    dealt = PerRound(lambda n, seed: fl.iid(100, n, seed), 50)
    assert Sizes.of(Plan(dealt, fraction=0.5, batch_size=3, epochs=1, seed=0)) == ({3, 1}, {4})


@compiles
@pytest.mark.parametrize("name", ["fed-ams", "mime-lamb"])
def test_a_run_that_goes_on_takes_the_same_programs_to_the_same_bits(
    name: str, tmp_path: Path
) -> None:
    data = fl.digits()
    task = fl.Task(fl.mlp(64, [32], 10), train=data.train, test=data.test)
    clients = np.split(np.arange(1431), np.cumsum(range(18, 53))[:-1])  # all of different sizes
    options: Any = {"clients": clients, "fraction": 0.2, "rounds": 6, "batch_size": 32}
    whole, later = (
        fl.fit(METHODS[name], task, executor="loop", compile=True, **options) for _ in range(2)
    )
    for done in whole:
        if done.number == 3:
            whole.save(tmp_path / "run")
    later.restore(tmp_path / "run")
    list(later)
    assert all(torch.equal(value, later.params[key]) for key, value in whole.params.items())


def images(seed: int, size: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.rand(40, 1, size, size, generator=draw, dtype=torch.float64)
    x[:, :, : size // 2] = 0.0  # so that many windows of a pool are alike
    return x, torch.randint(0, 4, (40,), generator=draw)


@compiles
def test_convolutions_pools_and_dropout_take_the_same_steps() -> None:
    model = build_model("cnn", (1, 16, 16), 4).double()
    task = fl.Task(model, train=images(0, 16), test=images(1, 16))
    assert_same(fl.FedSGD(lr=0.1), task, 3, clients=fl.iid(40, 4), batch_size=5)


@compiles
def test_full_gradients_are_the_same_in_parts_without_dropout_and_for_many_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fedlamb.simulate.compiled_loop.sizes.CHUNK", 7)
    model = build_model("cnn", (1, 16, 16), 4).double()
    task = fl.Task(model, train=images(0, 16), test=images(1, 16))
    clients = [range(13), range(13, 25), range(25, 38)]
    options: Any = {"rounds": 1, "clients": clients, "executor": "loop", "compile": True}
    run = fl.fit(fl.Mime(lr=0.1), task, **options)
    gradients = run._executor.gradients
    plain = Autograd(task)
    for count in (13, 12, 5):  # in parts of 6 and 7; of 6 alone; of a third size
        rows = torch.randperm(40, generator=torch.Generator().manual_seed(count))[:count]
        given = task.params, task.buffers, Batch(rows)
        found, expected = gradients.full(*given), plain.full(*given)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)
            assert found[name].stride() == value.stride()
    assert set(gradients._programs) == {6, 7}


@compiles
def test_batch_norm_takes_the_same_steps_also_on_other_data_of_the_same_shapes() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3 * 36, 4)
        model = nn.Sequential(*layers).double()
    for seed in (0, 1):  # the second time, programs come from the compiler's cache
        task = fl.Task(model, train=images(seed, 8), test=images(9, 8))
        assert_same(fl.FedSGD(lr=0.1), task, 3, clients=fl.iid(40, 4), batch_size=5)
    assert_same(fl.Mime(lr=0.001), task, 2, clients=fl.iid(40, 4), batch_size=5)


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> None:
        raise RuntimeError("no working C++ compiler")

    monkeypatch.setattr("torch._inductor.compile", fails)
    small = Small()
    options = {"clients": small.clients(), "rounds": 1, "batch_size": 3, "executor": "loop"}
    run = fl.fit(fl.FedSGD(lr=0.1), small.task(), compile=True, **options)
    with pytest.raises(fl.SettingError, match=r"leave it off, or install g\+\+ .*no working C"):
        next(run)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    ("size", "options"),
    [(8, {}), (7, {}), (8, {"stride": 1}), (8, {"padding": 1}), (7, {"ceil_mode": True})],
)
def test_pools_are_the_same_where_pixels_are_equal(layout: Any, size: int, options: Any) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(-2, 2, (5, 3, size, size), generator=draw).double()
    x = x.contiguous(memory_format=layout)

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            y = F.max_pool2d(leaf, 2, **options)
            (gradient,) = torch.autograd.grad((y * torch.arange(y.numel()).view_as(y)).sum(), leaf)
        return y.detach(), gradient

    program = make_fx(both, decomposition_table=DECOMPOSITIONS)(x)
    for expected, found in zip(both(x), program(x), strict=True):
        assert torch.equal(expected, found)
    torchs_own = "max_pool2d_with_indices.default" in program.code
    assert torchs_own == (size == 7 or bool(options))


def convolution_and_pool(x: Tensor, weight: Tensor, bias: Tensor, **options: Any) -> list[Tensor]:
    """What comes out, and the gradients of weight and bias."""
    with torch.enable_grad():
        leaves = weight.detach().requires_grad_(), bias.detach().requires_grad_()
        y = F.relu(F.max_pool2d(F.conv2d(x, *leaves, **options), 2))
        found = torch.autograd.grad((y * torch.arange(y.numel()).view_as(y)).sum(), leaves)
    return [y.detach(), *found]


def whole_numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Few of them, so that sums are exact and many pixels are equal."""
    draw = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-2, 3, shape, generator=draw).to(dtype)


@compiles
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("channels", "out", "kernel", "side", "padding"),
    [(1, 10, 5, 28, 0), (3, 6, 5, 32, 2), (2, 7, 4, 11, 0), (1, 3, 3, 9, 1), (1, 16, 11, 20, 5)],
)
def test_a_convolution_and_its_pool_are_the_same_as_one_operation(
    channels: int, out: int, kernel: int, side: int, padding: int, dtype: Any, layout: Any
) -> None:
    x = whole_numbers(5, channels, side, side, dtype=dtype).to(memory_format=layout)
    weight = whole_numbers(out, channels, kernel, kernel, dtype=dtype).to(memory_format=layout)
    given = x, weight, whole_numbers(out, dtype=dtype)

    def both(*tensors: Tensor) -> list[Tensor]:
        return convolution_and_pool(*tensors, padding=padding)

    graph = joined(make_fx(both)(*given))
    assert graph.code.count("fedlamb") == 2
    assert "aten.convolution" not in graph.code
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        for expected, found in zip(both(*given), graph(*given), strict=True):
            assert torch.equal(expected, found)
        torch.set_num_threads(before)


@pytest.mark.parametrize("stop", ["stride", "many channels", "input", "beside", "places", "pool"])
def test_what_is_not_a_first_convolution_and_its_pool_is_left_alone(stop: str) -> None:
    def both(x: Tensor, weight: Tensor) -> Any:
        with torch.enable_grad():
            leaves = weight.detach().requires_grad_(), x.detach().requires_grad_()
            inputs = leaves[1] if stop == "input" else x
            y = F.conv2d(inputs, leaves[0], stride=2 if stop == "stride" else 1)
            pooled, places = F.max_pool2d(y, 2, padding=int(stop == "pool"), return_indices=True)
            loss = pooled.sum() + (y.sum() if stop == "beside" else 0)
            wanted = leaves if stop == "input" else leaves[:1]
            found = torch.autograd.grad(loss, wanted)
        return [*found, places] if stop == "places" else list(found)

    out = 17 if stop == "many channels" else 4
    x = whole_numbers(2, 1, 9, 9, dtype=torch.float64)
    weight = whole_numbers(out, 1, 3, 3, dtype=torch.float64)
    graph = joined(make_fx(both)(x, weight))
    assert "fedlamb" not in graph.code
    for expected, found in zip(both(x, weight), graph(x, weight), strict=True):
        assert torch.equal(expected, found)


@compiles
@pytest.mark.parametrize("gradients", [True, False])
def test_a_convolution_without_bias_on_other_than_square_images_is_joined(gradients: bool) -> None:
    def both(x: Tensor, weight: Tensor) -> list[Tensor]:
        with torch.set_grad_enabled(gradients):
            leaf = weight.detach().requires_grad_(gradients)
            y = F.max_pool2d(F.conv2d(x, leaf), 2)
            return [y.detach(), *(torch.autograd.grad(y.sum(), leaf) if gradients else ())]

    given = [whole_numbers(*s, dtype=torch.float64) for s in ((3, 1, 8, 13), (4, 1, 3, 3))]
    graph = joined(make_fx(both)(*given))
    assert graph.code.count("fedlamb") == 1 + gradients
    for expected, found in zip(both(*given), graph(*given), strict=True):
        assert torch.equal(expected, found)


@compiles
def test_what_is_no_number_goes_through_a_convolution_and_its_pool() -> None:
    x = torch.rand(2, 1, 9, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[0, 0, 4, 4], x[1, 0, 0, 0], x[1, 0, 8, 8] = torch.nan, torch.inf, -torch.inf
    weight = torch.tensor([1.0, -1.0], dtype=torch.float64).expand(3, 1, 2, 2).contiguous()
    both = lambda x, weight: F.max_pool2d(F.conv2d(x, weight), 2)  # noqa: E731
    graph = joined(make_fx(both)(x, weight))
    assert "fedlamb" in graph.code
    expected = both(x, weight)
    assert expected.isnan().any()
    assert not expected.isnan().all()
    torch.testing.assert_close(graph(x, weight), expected, equal_nan=True, rtol=1e-12, atol=0)


def test_a_step_along_a_product_becomes_part_of_it() -> None:
    def step(weight: Tensor, a: Tensor, b: Tensor, rate: Tensor) -> Tensor:
        return weight + (-rate) * (a @ b).t().t()

    given = [whole_numbers(*shape, dtype=torch.float64) for shape in ((4, 3), (4, 5), (5, 3))]
    graph = inside_products(make_fx(step)(*given, torch.tensor(0.5)))
    assert "aten.addmm" in graph.code
    assert "aten.mm" not in graph.code
    assert torch.equal(graph(*given, torch.tensor(0.5)), step(*given, torch.tensor(0.5)))


@compiles
def test_the_steps_of_fed_sgd_are_taken_inside_products(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def watched(graph: Any) -> Any:
        seen.append(inside_products(graph).code)
        return graph

    monkeypatch.setattr(program, "inside_products", watched)
    x, y = torch.linspace(-1, 1, 256).reshape(16, 1, 4, 4), torch.arange(16) % 4
    task = fl.Task(build_model("mlp", (1, 4, 4), 4, hidden=[8]), (x, y), (x, y))
    next(fl.fit(fl.FedSGD(lr=0.1), task, clients=[range(16)], rounds=1, compile=True))
    of_steps = [code for code in seen if "nll_loss" in code]
    # Two forward with their biases, two of the weights' steps; one product is that of the hidden.
    assert [(code.count("aten.addmm"), code.count("aten.mm")) for code in of_steps] == [(4, 1)]


@pytest.mark.parametrize("stop", ["turned", "used twice", "matrix", "row", "dtype", "constant"])
def test_other_products_are_left_alone(stop: str) -> None:
    def step(weight: Tensor, a: Tensor, b: Tensor, rate: Tensor) -> list[Tensor]:
        if stop == "constant":
            return [weight + a * constant]
        product = a[:1] @ b if stop == "row" else a @ b
        weight = weight.float() if stop == "dtype" else weight
        scale = weight if stop == "matrix" else rate
        new = weight + scale * (product.t() if stop == "turned" else product)
        return [new, product] if stop == "used twice" else [new]

    constant = torch.ones(4, 4, dtype=torch.float64)
    given = [whole_numbers(4, 4, dtype=torch.float64) for _ in range(3)]
    graph = inside_products(make_fx(step)(*given, torch.tensor(0.5)))
    assert "aten.addmm" not in graph.code
    for expected, found in zip(
        step(*given, torch.tensor(0.5)), graph(*given, torch.tensor(0.5)), strict=True
    ):
        assert torch.equal(expected, found)


@compiles
def test_uint8_images_and_frozen_parameters_take_the_same_steps() -> None:
    x, y = images(0, 16)
    model = build_model("cnn", (1, 16, 16), 4).double()
    model.conv1.requires_grad_(False)
    data = (x * 255).to(torch.uint8), y
    inputs = fl.Images(mean=(127.0,), std=(64.0,))
    task = fl.Task(model, train=data, test=data, inputs=inputs)
    assert_same(fl.FedSGD(lr=0.1), task, 2, clients=fl.iid(40, 4), batch_size=5)


@compiles
class NeedsTwo(nn.Flatten):
    def forward(self, x: Tensor) -> Tensor:
        if self.training and len(x) == 1:
            raise ValueError("one is not enough")
        return super().forward(x)


def test_an_error_of_the_models_own_is_told_as_it_is() -> None:
    with torch.random.fork_rng():
        model = nn.Sequential(NeedsTwo(), nn.Linear(64, 4)).double()
    task = fl.Task(model, train=images(0, 8), test=images(1, 8))
    run = fl.fit(fl.FedSGD(lr=0.1), task, rounds=1, clients=[[0]], compile=True)
    with pytest.raises(ValueError, match="one is not enough"):
        next(run)


@compiles
def test_the_test_pass_is_the_same_for_sets_of_any_size() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4)).double()
    x, y = images(3, 8)
    for rows in (1, 1025):  # the latter in chunks of 513 and 512 rows
        many = torch.arange(rows) % 40
        task = fl.Task(model, train=(x, y), test=(x[many], y[many]), validation=(x[:7], y[:7]))
        outputs_of = CompiledOutputs(task)
        for _ in range(2):
            found = task.evaluate(task.params, task.buffers, None, outputs_of)
            assert found == pytest.approx(task.evaluate(task.params, task.buffers), rel=1e-12)
