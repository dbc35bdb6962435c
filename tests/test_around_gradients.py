"""What follows a gradient, compiled, gives what the algorithm gives."""

import shutil
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fedlamb as fl
from fedlamb.local_round import local_round
from fedlamb.simulate.compiled_loop import program
from fedlamb.simulate.compiled_loop.around_gradients import AroundGradients
from fedlamb.simulate.compiled_loop.lists import DECOMPOSITIONS, addcmul_, lerp
from fedlamb.simulate.compiled_loop.sizes import Sizes
from fedlamb.simulate.loop import Autograd
from fedlamb.simulate.nested import tree_flatten
from fedlamb.tasks.images import Batch
from fedlamb.tasks.models import build_model
from fedlamb.trees import Tree
from test_executors import METHODS

# torch's compiler warns of what it imports itself.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
compiles = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to compile")


def task() -> fl.Task:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(24, 2, 16, 16, generator=draw, dtype=torch.float64)
    y = torch.arange(24) % 3
    return fl.Task(build_model("cnn", (2, 16, 16), 3).double(), (x, y), (x, y))


def after(algorithm: Any, round: int, compiled: bool) -> tuple[list[Tensor], Any]:
    """Everything that a client leaves behind after this round, and what took its steps."""
    run = fl.fit(algorithm, task(), clients=[range(12), range(12, 24)], rounds=9, batch_size=5)
    for _ in range(round - 1):
        next(run)
    sent = algorithm.broadcast(run.server)
    sent = sent._replace(lr=torch.tensor(sent.lr, dtype=torch.float64))  # as it is on a GPU
    rows = torch.arange(12)
    key = torch.tensor(7)
    batches = [Batch(rows[:5], key=key), Batch(rows[5:10], key=key), Batch(rows[10:], key=key)]
    given = run.store.state(0), sent, run.buffers, Batch(rows), batches
    steps = AroundGradients(algorithm, run.task) if compiled else None
    found = local_round(algorithm, Autograd(run.task), *given, steps=steps)
    return tree_flatten(found)[0], steps


@compiles
@pytest.mark.parametrize(
    ("name", "on_cpu"), [*((name, False) for name in METHODS), ("fed-lamb", True)]
)
def test_each_method_takes_the_same_steps(
    name: str, on_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # False: traced as for a GPU, though compiled for this machine.
    monkeypatch.setattr(program, "_on_cpu", lambda tensor: on_cpu)
    for round in (1, 2) if name == "fed-lamb" else (2,):
        expected, _ = after(METHODS[name], round, compiled=False)
        found, steps = after(METHODS[name], round, compiled=True)
        assert all(steps._known.values())
        for one, two in zip(expected, found, strict=True):
            torch.testing.assert_close(two, one, rtol=1e-10, atol=1e-12)


@dataclass(frozen=True, kw_only=True)
class Elsewhere(fl.FedSGD):
    """Asks for gradients that no program can be made around."""

    extrapolates: bool = False

    def client_step(self, local: Any, sent: Any, grad_at: Any) -> Any:
        point: Tree = {name: 2 * t for name, t in local.x.items()} if self.extrapolates else local.x
        gradient = grad_at(point)
        if not self.extrapolates:
            gradient = grad_at({name: t - gradient[name] for name, t in local.x.items()})
        return local._replace(x={n: t - sent.lr * gradient[n] for n, t in local.x.items()})


@pytest.mark.parametrize("extrapolates", [False, True])
def test_gradients_at_points_of_its_own_are_left_to_the_algorithm(extrapolates: bool) -> None:
    algorithm = Elsewhere(lr=0.1, extrapolates=extrapolates)
    expected, _ = after(algorithm, 2, compiled=False)
    found, steps = after(algorithm, 2, compiled=True)
    assert list(steps._known.values()) == [None]
    assert all(torch.equal(one, two) for one, two in zip(expected, found, strict=True))


@pytest.mark.parametrize("weight", [0.001, 0.1, 0.5, 0.9, 0.999])
def test_lists_are_mixed_without_losing_digits(weight: float) -> None:
    draw = torch.Generator().manual_seed(0)
    a = [torch.rand(5, 3, generator=draw), torch.rand(7, generator=draw)]
    b = [1e-6 * torch.rand(5, 3, generator=draw), 1e6 * torch.rand(7, generator=draw)]
    for start, end in ((a, b), (b, a)):
        for one, two, new in zip(start, end, lerp(start, end, weight), strict=True):
            right = (1 - weight) * one.double() + weight * two.double()
            torch.testing.assert_close(new.double(), right, rtol=3e-7, atol=0)
        changed = [t.clone() for t in start]
        addcmul_(changed, end, start, weight)
        for one, two, new in zip(start, end, changed, strict=True):
            right = one.double() + weight * two.double() * one.double()
            torch.testing.assert_close(new.double(), right, rtol=3e-7, atol=0)


def test_norms_are_put_together_by_one_operation() -> None:
    norms = [torch.tensor(float(number)) for number in range(62)]
    graph = make_fx(lambda *given: torch.stack(given), decomposition_table=DECOMPOSITIONS)(*norms)
    assert [n.target for n in graph.graph.nodes if n.op == "call_function"] == [
        torch.ops.fedlamb.stack.default
    ]
    assert torch.equal(graph(*norms), torch.arange(62.0))


def test_of_many_kinds_of_rounds_only_some_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedlamb.simulate.compiled_loop.around_gradients._KINDS", 0)
    expected, _ = after(fl.FedSGD(lr=0.1), 2, compiled=False)
    found, steps = after(fl.FedSGD(lr=0.1), 2, compiled=True)
    assert steps._known == {}
    assert all(torch.equal(one, two) for one, two in zip(expected, found, strict=True))


def test_the_model_is_compiled_for_few_sizes_of_batches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[int] = []

    def compile(model: Any, **options: Any) -> Any:
        def run(x: Tensor) -> Any:
            seen.append(len(x))
            return model(x)

        return run

    monkeypatch.setattr(torch, "compile", compile)
    given = task()
    sizes = Sizes(steps=frozenset({1, 2, 9}), full=frozenset({3}))
    compiled, plain = Autograd(given, compile=sizes), Autograd(given)
    for size in (*range(1, 10), 1, 9):
        batch = Batch(torch.arange(size), key=torch.tensor(7))
        one, _, loss = compiled.minibatch(given.params, given.buffers, batch)
        two, _, expected = plain.minibatch(given.params, given.buffers, batch)
        assert loss == expected
        assert all(torch.equal(one[name], two[name]) for name in two)
    for size in (2, 3):
        compiled.full(given.params, given.buffers, Batch(torch.arange(size)))
    assert seen == [1, 2, 9, 1, 9, 3]
    said = capsys.readouterr().err
    assert said.count("compiling the model") == said.count("rare sizes") == 1
