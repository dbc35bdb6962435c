"""Runs that go on with the programs of others give what they give alone."""

import shutil
from dataclasses import replace
from typing import Any

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
    sharing.share_programs(before)
    assert sharing._executor._compiled is before._executor._compiled
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


def test_other_data_or_another_model_share_nothing() -> None:
    task, _ = tasks()
    before = run(fl.FedSGD(lr=0.1), task)
    x, y = (part.clone() for part in task.train)
    with torch.random.fork_rng():
        wider = torch.nn.Sequential(torch.nn.Linear(4, 3)).double()
    for other in (fl.Task(Small().module(), (x, y), (x, y)), fl.Task(wider, task.train, task.test)):
        sharing = run(fl.FedSGD(lr=0.1), other)
        sharing.share_programs(before)
        assert sharing._executor.gradients is not before._executor.gradients
