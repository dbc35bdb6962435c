"""The run as an iterator: what it leaves alone, and what a failure leaves behind."""

import copy
import gc
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedlamb as fl
from fedlamb.tasks.partition import Rows
from problems import Recorded, Small

SMALL = Small(sizes=(6, 9, 4), rounds=4, seed=3)


def test_the_example_of_the_readme_in_spirit():
    data = fl.digits()
    task = fl.Task(fl.mlp(64, [16], 10), train=data.train, test=data.test)
    clients = fl.shards(data.train[1], n=10, per_client=2)
    run = fl.fit(fl.FedLAMB(lr=0.03), task, clients=clients, fraction=0.5, rounds=3, seed=0)
    rounds = list(run)
    assert [r.number for r in rounds] == [1, 2, 3]
    assert all(len(r.clients) == 5 for r in rounds)
    assert set(rounds[0].metrics) == {"train_loss", "test_loss", "test_accuracy"}
    with pytest.raises(StopIteration):
        next(run)


def test_model_and_data_of_the_caller_are_never_changed():
    module = SMALL.module()
    before = copy.deepcopy(module.state_dict())
    x, y = (torch.from_numpy(part) for part in SMALL.data())
    kept = x.clone(), y.clone()
    task = fl.Task(module, train=(x, y), test=(x, y))
    run = fl.fit(fl.FedLAMB(lr=0.1), task, clients=SMALL.clients(), rounds=2)
    list(run)
    assert all(torch.equal(before[n], p) for n, p in module.state_dict().items())
    assert torch.equal(x, kept[0])
    assert torch.equal(y, kept[1])
    assert module.training
    trained = run.model()
    assert all(torch.equal(run.params[n], p) for n, p in trained.state_dict().items())
    trained[0].weight.data.zero_()
    assert bool(run.params["0.weight"].abs().sum() > 0)


def test_evaluation_is_the_mean_over_all_examples(monkeypatch):
    task = SMALL.task()
    whole = task.evaluate(task.params, task.buffers)
    monkeypatch.setattr("fedlamb.tasks.task.CHUNK", 4)
    parts = task.evaluate(task.params, task.buffers)
    assert parts == pytest.approx(whole, rel=1e-12)
    outputs = task.model(task.test[0])
    assert whole["test_accuracy"] == float((outputs.argmax(1) == task.test[1]).double().mean())


def test_train_loss_is_the_mean_over_steps_and_clients():
    small = Small(sizes=(6, 6), rounds=1)
    run = small.fit(fl.FedSGD(lr=1e-12), batch_size=3)
    task, done = run.task, next(run)
    steps = [b for client in (0, 1) for b in run.plan.batches(1, client)]
    x, y = task.train
    losses = [task.loss(task.model(x[b]), y[b]).item() for b in steps]
    assert done.metrics["train_loss"] == pytest.approx(sum(losses) / 4, rel=1e-9)


def test_regression_with_any_loss_and_metric():
    small = Small(kind="regression")
    x, y = small.data()
    task = fl.Task(
        small.module(),
        train=(x, y),
        test=(x, y),
        loss=nn.functional.l1_loss,
        metrics={
            "largest": lambda out, target: (out - target).abs().max(),
            "one": lambda out, target: (out - target).abs().max().reshape(1),
            "number": lambda out, target: float((out - target).abs().max()),
        },
    )
    metrics = next(fl.fit(fl.FedSGD(lr=0.1), task, clients=[range(20)], rounds=1)).metrics
    assert set(metrics) == {"train_loss", "test_loss", "test_largest", "test_one", "test_number"}
    assert metrics["test_one"] == metrics["test_number"] == metrics["test_largest"]


def test_a_round_that_fails_leaves_the_run_as_it_was_and_names_the_client():
    fails = {"now": False}

    class Fragile(Recorded):
        def client_step(self, local, sent, grad_at):
            if fails["now"] and len(self.locals) % 7 == 6:
                raise RuntimeError("out of luck")
            return super().client_step(local, sent, grad_at)

    run = SMALL.fit(Fragile(fl.FedLAMB(lr=0.05)))
    whole = [r.metrics for r in SMALL.fit(fl.FedLAMB(lr=0.05))]
    begun = [next(run).metrics]
    fails["now"] = True
    with pytest.raises(RuntimeError, match="out of luck") as caught:
        next(run)
    assert caught.value.__notes__[0].startswith("in the local round of client ")
    assert caught.value.__notes__[0].endswith(", round 2")
    fails["now"] = False
    assert begun + [r.metrics for r in run] == whole


def test_a_run_that_diverges_ends():
    run = Small(kind="regression", rounds=50).fit(fl.FedSGD(lr=1e20))
    with pytest.warns(RuntimeWarning, match=r"no longer finite after round \d+ of 50; a lower"):
        rounds = list(run)
    assert run.diverged
    assert len(rounds) < 50
    assert not np.isfinite(rounds[-1].metrics["test_loss"])


def test_momentum_belongs_to_the_client_and_waits_for_it():
    """A client that sits out keeps the momentum of its last round, to the bit."""
    run = Small(sizes=(4, 4, 4, 4), rounds=12, federation={"fraction": 0.25}).fit(
        fl.FedAMS(lr=0.01)
    )
    last: dict[int, torch.Tensor] = {}
    for r in run:
        for client, m in last.items():
            if client not in r.clients:
                assert torch.equal(run.store.state(client).m["0.weight"], m)
        for client in r.clients:
            last[client] = run.store.state(client).m["0.weight"].clone()
    assert len(last) == 4


def test_momentum_reset_keeps_nothing():
    run = SMALL.fit(fl.FedLAMB(lr=0.05, momentum="reset"))
    list(run)
    assert all(state.m == {} for state in run.store.states.values())


def test_uniform_and_example_weighting_differ_on_unequal_clients():
    uniform = SMALL.fit(fl.FedSGD(lr=0.1))
    examples = SMALL.fit(fl.FedSGD(lr=0.1), weighting="examples")
    list(uniform), list(examples)
    assert not torch.allclose(uniform.params["0.weight"], examples.params["0.weight"])


def test_float32_agrees_with_float64_to_rounding():
    def final(dtype):
        x, y = SMALL.data()
        task = fl.Task(SMALL.module().to(dtype), train=(x, y), test=(x, y))
        run = fl.fit(fl.FedLAMB(lr=0.05), task, clients=SMALL.clients(), rounds=3, batch_size=3)
        list(run)
        assert run.params["0.weight"].dtype == dtype
        return run.params["0.weight"].double()

    assert torch.allclose(final(torch.float32), final(torch.float64), atol=1e-4)


def test_client_states_past_the_limit_go_to_disk_and_come_back(tmp_path):
    small = Small(sizes=(3,) * 12, rounds=8)
    plain, spilling = (small.fit(fl.FedLAMB(lr=0.03), fraction=0.34) for _ in range(2))
    spilling.store.limit = 1  # byte: all but one state
    for a, b in zip(plain, spilling, strict=True):
        assert a.metrics == b.metrics
        assert len(spilling.store.states) == 1
        assert len(spilling.store) == len(plain.store)
    for client, state in plain.store.all().items():
        mine = spilling.store.all()[client]
        assert all(torch.equal(state.m[n], mine.m[n]) for n in state.m)
    spilling.save(tmp_path / "c")
    again = small.fit(fl.FedLAMB(lr=0.03), fraction=0.34)
    again.store.limit = 1
    again.restore(tmp_path / "c")
    assert len(again.store) == len(plain.store)
    folder = spilling.store._folder
    assert folder.exists()
    del spilling
    gc.collect()
    assert not folder.exists()


def test_a_million_clients_take_as_long_as_a_thousand():
    """Planning a round and its memory do not grow with the population."""
    data = fl.digits()
    task = fl.Task(fl.mlp(64, [4], 10), data.train, data.test)
    runs, seconds = {}, {}
    for n in (1_000, 1_000_000):
        rows = Rows(torch.arange(n) % 1437, torch.ones(n, dtype=torch.int64))
        runs[n] = fl.fit(fl.FedLAMB(lr=0.03), task, clients=rows, fraction=100 / n, rounds=20)
        assert len(next(runs[n]).clients) == 100
        seconds[n] = []
    for _ in range(15):
        for n, run in runs.items():
            begun = time.process_time()  # whatever else the machine is doing
            next(run)
            seconds[n].append(time.process_time() - begun)
    assert all(len(run.store) <= 1600 for run in runs.values())
    assert min(seconds[1_000_000]) < 1.5 * min(seconds[1_000])


def test_data_without_a_model_are_no_task() -> None:
    with pytest.raises(fl.SettingError, match=r"task = 'Dataset': must be a fedlamb\.Task"):
        fl.fit(fl.FedSGD(lr=0.1), fl.digits(), clients=fl.iid(1437, 2), rounds=1)  # type: ignore[arg-type]


def test_an_algorithm_that_changes_in_place_is_told_and_does_not_reach_the_task() -> None:
    class InPlace(fl.FedSGD):
        def client_step(self, local: Any, sent: Any, grad_at: Any) -> Any:
            gradient = grad_at(local.x)
            for name, tensor in local.x.items():
                tensor.sub_(gradient[name])
            return local

    task = Small().task()
    before = {name: p.clone() for name, p in task.params.items()}
    options: Any = {"clients": Small().clients(), "rounds": 1, "batch_size": 4}
    run = fl.fit(InPlace(lr=0.1), task, **options)
    with pytest.raises(fl.SettingError, match="algorithm = 'InPlace': must not change in place"):
        next(run)
    assert run.number == 0
    assert all(torch.equal(p, before[name]) for name, p in task.params.items())


@pytest.mark.parametrize("executor", ["loop", "vectorised"])
def test_a_round_that_cannot_be_dealt_is_told_when_it_comes(executor: str) -> None:
    """What is planned ahead must not take the finished round with it."""
    seeds: list[int] = []

    def deal(parts: int, seed: int) -> Any:
        if seed not in seeds:
            seeds.append(seed)
        if len(seeds) > 3:  # one for the check, and two rounds
            raise ValueError("no more rows")
        return fl.iid(1437, parts, seed)

    data = fl.digits()
    task = fl.Task(fl.mlp(64, [4], 10), data.train, data.test)
    clients = fl.PerRound(deal, n=4)
    run = fl.fit(fl.FedSGD(lr=0.1), task, clients=clients, rounds=5, executor=executor)
    assert [next(run).number, next(run).number] == [1, 2]
    with pytest.raises(ValueError, match="no more rows"):
        next(run)
    assert run.number == 2
