"""Compiled local steps give what plain ones give."""

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F  # noqa: N812

import fedlamb as fl
from fedlamb.simulate.pooling import DECOMPOSITIONS
from fedlamb.tasks.models import build_model
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
    ((sizes),) = run._executor._compiled._programs.values()
    assert len(sizes) == 4


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
def test_batch_norm_takes_the_same_steps_also_on_other_data_of_the_same_shapes() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3 * 36, 4)
        model = nn.Sequential(*layers).double()
    for seed in (0, 1):  # the second time, programs come from the compiler's cache
        task = fl.Task(model, train=images(seed, 8), test=images(9, 8))
        assert_same(fl.FedSGD(lr=0.1), task, 3, clients=fl.iid(40, 4), batch_size=5)


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
    ("size", "options"), [(8, {}), (7, {}), (8, {"stride": 1}), (8, {"padding": 1})]
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
