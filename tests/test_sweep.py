"""A sweep gives what separate runs give."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedlamb as fl
from fedlamb.simulate.sweep import Point, Sweep, Together
from problems import Small
from test_executors import METHODS

GRIDS = {
    "fed-sgd": {"lr": [0.01, 0.1]},
    "adp-fed": {"lr": [0.1, 0.05], "server_lr": [0.05, 0.01], "beta2": [0.9, 0.99]},
    "fed-ams": {"lr": [0.01, 0.03], "first_round": ["local", "vhat"], "eps": [1e-4, 1e-2]},
    "fed-lamb": {"lr": [0.01, 0.05], "weight_decay": [0.0, 0.01], "phi_min": [1e-3, 0.5]},
    "mime": {"lr": [0.01, 0.003], "sync_every": [1, 3], "momentum": ["persist", "reset"]},
    "mime-lamb": {"lr": [0.01, 0.05], "layers": ["tensor", "module"], "beta1": [0.5, 0.9]},
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("sizes", [(6, 6, 6, 6), (7, 3, 9, 5)], ids=["equal", "ragged"])
def test_a_sweep_equals_separate_runs_over_ten_rounds(name: str, sizes: Any) -> None:
    small, method = Small(sizes=sizes), METHODS[name]
    options = {"clients": small.clients(), "rounds": 10, "batch_size": 4, "fraction": 0.5}
    task = small.task()
    together = fl.sweep(method, task, grid=GRIDS[name], seeds=(0, 1), **options)
    rounds = list(together)
    assert len(rounds) == 10
    for i, point in enumerate(together.points):
        alone = fl.fit(replace(method, **point.values), task, seed=point.seed, **options)
        for done in alone:
            found = rounds[done.number - 1][i]
            assert found is not None
            assert found.clients == done.clients
            assert found.uplink_bytes == done.uplink_bytes
            assert found.downlink_bytes == done.downlink_bytes
            assert found.metrics == pytest.approx(done.metrics, rel=1e-9, abs=1e-9)
        for key, value in alone.params.items():
            torch.testing.assert_close(point.run.params[key], value, rtol=1e-9, atol=1e-9)


def test_a_trial_that_diverges_does_not_harm_the_others() -> None:
    small = Small(kind="regression")
    options = {"clients": small.clients(), "rounds": 4, "batch_size": 3}
    together = fl.sweep(fl.FedSGD(lr=0.1), small.task(), grid={"lr": [1e200, 0.1]}, **options)
    rounds = list(together)
    assert together.points[0].run.diverged
    assert rounds[-1][0] is None
    alone = list(fl.fit(fl.FedSGD(lr=0.1), small.task(), **options))
    assert rounds[-1][1].metrics == pytest.approx(alone[-1].metrics, rel=1e-9)


@pytest.mark.filterwarnings("ignore:the model is no longer finite")
@pytest.mark.parametrize("rates", [[0.001, 1.0], [0.001, 1.0, 0.002, 1.5], [1.0, 1.2, 0.001]])
def test_trials_that_diverge_later_and_together_do_not_harm_the_others(rates: list[float]) -> None:
    draw = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(400, 5, generator=draw).double()
    data = x, x @ torch.randn(5, 1, generator=draw).double()
    with torch.random.fork_rng():
        task = fl.Task(nn.Linear(5, 1).double(), train=data, test=data)
    options: Any = {"clients": fl.iid(400, n=6), "rounds": 60, "batch_size": 10}
    together = fl.sweep(fl.FedSGD(lr=0.001), task, grid={"lr": rates}, **options)
    rounds = list(together)
    for number, rate in enumerate(rates):
        alone = list(fl.fit(fl.FedSGD(lr=rate), task, **options))
        assert (len(alone) < 60) == (rate >= 1)
        found = [each[number] for each in rounds if each[number] is not None]
        if rate < 1:
            assert [r.metrics for r in found] == [pytest.approx(r.metrics, rel=1e-6) for r in alone]


def test_chunks_of_trials_give_the_same(monkeypatch: Any) -> None:
    small = Small()
    options = {"clients": small.clients(), "rounds": 3, "batch_size": 3}
    grid = {"lr": [0.01, 0.02, 0.05, 0.1, 0.2]}
    whole = list(fl.sweep(fl.FedLAMB(lr=1.0), small.task(), grid=grid, **options))
    monkeypatch.setattr("fedlamb.simulate.sweep._trials_at_once", lambda run: 2)
    parts = list(fl.sweep(fl.FedLAMB(lr=1.0), small.task(), grid=grid, **options))
    for one, two in zip(whole, parts, strict=True):
        for a, b in zip(one, two, strict=True):
            assert a.metrics == pytest.approx(b.metrics, rel=1e-12)


def test_later_sweeps_use_the_same_programs_also_where_they_differ_otherwise() -> None:
    small, together = Small(), Together(at_once=3)
    task, options = small.task(), {"clients": small.clients(), "rounds": 3, "batch_size": 3}
    algorithms = [
        [fl.FedLAMB(lr=lr) for lr in (0.01, 0.02, 0.05, 0.1)],
        [fl.FedLAMB(lr=0.3)],
        [fl.FedLAMB(lr=0.05, eps=eps, weight_decay=0.1) for eps in (1e-4, 1e-2)],
    ]
    for some in algorithms:
        points = [Point({}, 0, fl.fit(each, task, **options)) for each in some]
        rounds = list(Sweep(points, together))
        for i, each in enumerate(some):
            for done in fl.fit(each, task, **options):
                found = rounds[done.number - 1][i]
                assert found is not None
                assert found.metrics == pytest.approx(done.metrics, rel=1e-9)
    (family,) = together._families.values()
    assert family.varied == ("lr", "eps", "weight_decay")
    assert set(together._sizes.values()) == {3}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grid": {"rate": [1]}}, "grid = 'rate': must name fields of the algorithm"),
        ({"grid": {"lr": []}}, r"grid\['lr'\] = \[\]: must be a list of values"),
        ({"grid": {"lr": [-1.0]}}, "lr = -1.0: must be a positive number"),
        ({"grid": {}, "seeds": ()}, "seeds = .*: must name one or more seeds"),
        ({"grid": {}, "seeds": np.array([1, 1])}, "seeds = .*: must name one or more seeds"),
        ({"grid": {}, "seed": 3}, r"seed = 3: must be given as seeds=\(3,\)"),
    ],
)
def test_mistakes_are_told(changes: Any, message: str) -> None:
    small = Small()
    with pytest.raises(fl.SettingError, match=message):
        fl.sweep(fl.FedSGD(lr=0.1), small.task(), clients=small.clients(), rounds=1, **changes)


def test_models_that_cannot_be_stacked_run_one_after_another() -> None:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(50, 6, generator=draw), torch.arange(50) % 3
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    task = fl.Task(model, (x, y), (x, y))
    options: Any = {"clients": fl.iid(50, 3), "rounds": 2, "batch_size": 6}
    trials = fl.sweep(fl.FedSGD(lr=0.1), task, grid={"lr": [0.1, 0.2]}, **options)
    rounds = list(trials)
    for i, lr in enumerate((0.1, 0.2)):
        alone = list(fl.fit(fl.FedSGD(lr=lr), task, **options))
        assert [done[i].metrics for done in rounds] == [one.metrics for one in alone]
    grid = {"lr": [0.1, 0.2, 0.3], "weight_decay": [0.0, 0.1]}
    more = fl.sweep(fl.FedLAMB(lr=0.1), task, grid=grid, compile=True, **options)
    loops = [point.run._executor for point in more.points]
    assert len({id(loop.gradients) for loop in loops}) == 1
    assert len({id(loop._compiled) for loop in loops}) == 2


def test_a_sweep_asked_for_loops_has_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedlamb.simulate.vectorised.Stack.run", lambda *given: 1 / 0)
    x, y = torch.randn(12, 2, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2
    task = fl.Task(fl.mlp(2, [2], 2), (x, y), (x, y))
    options: Any = {"clients": fl.iid(12, 2), "rounds": 1, "grid": {"lr": [0.1]}}
    (done,) = fl.sweep(fl.FedSGD(lr=0.1), task, executor="loop", **options)
    assert done[0].number == 1
    with pytest.raises(ZeroDivisionError):
        next(fl.sweep(fl.FedSGD(lr=0.1), task, **options))
    for seeds in (3, (0, 0)):
        with pytest.raises(fl.SettingError, match="for example"):
            fl.sweep(fl.FedSGD(lr=0.1), task, seeds=seeds, **options)  # type: ignore[arg-type]
    with pytest.raises(fl.SettingError, match="each value once"):
        fl.sweep(fl.FedSGD(lr=0.1), task, **options | {"grid": {"lr": [0.1, 1e-1]}})
