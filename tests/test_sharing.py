"""Runs that go on with the programs of others give what they give alone."""

import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import fedlamb as fl
from problems import Small
from test_executors import METHODS

# torch's compiler warns of what it imports itself.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


def run(algorithm: Any, task: fl.Task, seed: int = 0, compile: bool = False) -> fl.Run:
    clients = Small().clients()
    return fl.fit(
        algorithm, task, clients=clients, rounds=3, batch_size=4, seed=seed,
        executor="loop", compile=compile,
    )  # fmt: skip


def tasks() -> tuple[fl.Task, fl.Task]:
    """The same data and model, another start."""
    one = Small().task()
    module = Small(seed=5).module()
    return one, fl.Task(module, one.train, one.test, loss=one.loss, metrics=one.metrics)


@pytest.mark.parametrize(
    ("name", "compile"), [*((name, False) for name in METHODS), ("fed-lamb", True)]
)
def test_other_rates_seeds_and_starts_share_programs(name: str, compile: bool) -> None:
    if compile and shutil.which("g++") is None:
        pytest.skip("needs g++ to compile")
    first, second = tasks()
    rates = {"lr": 0.5} | ({"server_lr": 0.3} if name == "adp-fed" else {})
    other = replace(METHODS[name], **rates)
    before = run(METHODS[name], first, compile=compile)
    list(before)
    alone, sharing = (run(other, second, seed=3, compile=compile) for _ in range(2))
    assert sharing.share_programs(before)
    assert sharing._executor.gradients is before._executor.gradients
    assert sharing._executor._compiled is before._executor._compiled
    assert sharing._outputs_of is before._outputs_of
    for one, two in zip(alone, sharing, strict=True):
        assert one.metrics == two.metrics
    for key, value in alone.params.items():
        assert torch.equal(value, sharing.params[key])


def test_another_algorithm_shares_gradients_alone() -> None:
    task, _ = tasks()
    before = run(fl.FedLAMB(lr=0.1), task, compile=True)
    adp_fed = fl.AdpFed(lr=0.1, server_lr=0.1)
    for other in (fl.FedLAMB(lr=0.1, weight_decay=0.1), fl.FedAMS(lr=0.1), adp_fed):
        sharing = run(other, task, compile=True)
        sharing.share_programs(before)
        assert sharing._executor.gradients is before._executor.gradients
        assert sharing._executor._compiled is not before._executor._compiled
        assert sharing._outputs_of is before._outputs_of is not None


def changed(kind: str) -> tuple[fl.Task, fl.Task]:
    """Two tasks that differ in one thing beside their start."""
    one, _ = tasks()
    first, second = Small().module(), Small(seed=5).module()
    x, y = one.train
    options: dict[str, Any] = {}
    match kind:
        case "data":
            return one, fl.Task(second, (x.clone(), y.clone()), (x, y))
        case "part of the data":
            more, rows = (torch.cat([x, x]), torch.cat([y, y])), len(x)
            part = more[0][:rows], more[1][:rows]
            return fl.Task(first, more, more), fl.Task(second, part, part)
        case "layer":
            second[1] = torch.nn.Sigmoid()
        case "hidden option":
            first[1], second[1] = torch.nn.Softplus(), torch.nn.Softplus()
            second[1].secret = 3  # type: ignore[assignment]
        case "frozen":
            first[0].requires_grad_(False)
            second[0].requires_grad_(False)
        case "tensor beside":
            first[1].table, second[1].table = torch.ones(2), torch.zeros(2)  # type: ignore[assignment]
        case "array beside":
            first[1].table, second[1].table = np.ones(2), np.zeros(2)  # type: ignore[assignment]
        case "loss":
            options["loss"] = torch.nn.functional.multi_margin_loss
    return fl.Task(first, (x, y), (x, y)), fl.Task(second, (x, y), (x, y), **options)


KINDS = ("data", "part of the data", "layer", "hidden option", "frozen", "tensor beside")
MORE = ("array beside", "loss")


@pytest.mark.parametrize("kind", [*KINDS, *MORE])
def test_what_differs_otherwise_shares_nothing(kind: str) -> None:
    one, two = changed(kind)
    before, sharing = (run(fl.FedSGD(lr=0.1), task) for task in (one, two))
    sharing.share_programs(before)
    assert sharing._executor.gradients is not before._executor.gradients


class HoldsItsRate(fl.FedSGD):
    """An algorithm of one's own, whose rate is not sent."""

    def client_step(self, local: Any, sent: Any, grad_at: Any) -> Any:
        gradient = grad_at(local.x)
        return local._replace(x={n: t - self.lr * gradient[n] for n, t in local.x.items()})


class NoDataclass:
    """One that is not even a dataclass."""

    def __init__(self, lr: float) -> None:
        self._of = HoldsItsRate(lr=lr)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


@pytest.mark.parametrize("kind", [HoldsItsRate, NoDataclass])
def test_rates_of_ones_own_algorithms_may_be_part_of_a_program(kind: Any) -> None:
    task, _ = tasks()
    before, sharing, alone = (run(kind(lr=lr), task) for lr in (0.01, 0.5, 0.5))
    list(before)
    assert not sharing.share_programs(before)
    assert [r.metrics for r in sharing] == [r.metrics for r in alone]


def test_a_run_that_is_compiled_shares_nothing_with_one_that_is_not() -> None:
    task, _ = tasks()
    one, two = (run(fl.FedSGD(lr=0.1), task, compile=compile) for compile in (False, True))
    assert not one.share_programs(two)
    assert not two.share_programs(one)
    assert one._executor.gradients is not two._executor.gradients
    assert two._executor._compiled is not None
