"""What every algorithm must satisfy. A new one joins by one line in the table."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.func import functional_call, grad_and_value, vmap

import fedlamb as fl
from fedlamb.local_round import local_round
from fedlamb.simulate.running_mean import RunningMean
from fedlamb.tasks.images import Batch
from fedlamb.wire import nbytes, pack, unpack, uplink_bytes
from problems import Small

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from write_your_own_algorithm import FedProx

TABLE: dict[str, Any] = {
    "fed-sgd": fl.FedSGD(lr=0.1),
    "adp-fed": fl.AdpFed(lr=0.1, server_lr=0.02),
    "fed-ams": fl.FedAMS(lr=0.02),
    "fed-lamb": fl.FedLAMB(lr=0.02, weight_decay=0.01),
    "mime": fl.Mime(lr=0.002),
    "mime-lamb": fl.MimeLAMB(lr=0.02, weight_decay=0.01),
    "fed-lamb, by module": fl.FedLAMB(lr=0.02, layers="module"),
    "fed-lamb, lazy": fl.FedLAMB(lr=0.02, sync_every=3, momentum="reset"),
    "mime-lamb, lazy": fl.MimeLAMB(lr=0.02, sync_every=2, schedule=fl.StepDecay((2,), 0.8)),
    "own example": FedProx(lr=0.1),
}
SMALL = Small(sizes=(6, 9, 4, 7), rounds=6, seed=11, federation={"fraction": 0.5})

every_algorithm = pytest.mark.parametrize("algorithm", TABLE.values(), ids=TABLE.keys())


def leaves(part: Any) -> list[torch.Tensor]:
    """All tensors in a state or message."""
    return [t for t in pack(part).values() if t.dim() > 0]


def same_bits(a: fl.Tree, b: fl.Tree) -> bool:
    return list(a) == list(b) and all(torch.equal(a[n], b[n]) for n in a)


def numbers(done: fl.Round) -> Any:
    return done.number, done.clients, done.metrics, done.uplink_bytes, done.downlink_bytes


@every_algorithm
def test_same_seed_same_bits(algorithm: Any) -> None:
    one, two = SMALL.fit(algorithm), SMALL.fit(algorithm)
    assert [numbers(r) for r in one] == [numbers(r) for r in two]
    assert same_bits(one.params, two.params)


@every_algorithm
def test_another_seed_another_trajectory(algorithm: Any) -> None:
    one, two = SMALL.fit(algorithm), SMALL.fit(algorithm, seed=99)
    assert [r.clients for r in one] != [r.clients for r in two]
    assert not same_bits(one.params, two.params)


@every_algorithm
@pytest.mark.parametrize("at", range(7))
def test_resumes_to_the_same_bits_at_any_round(algorithm: Any, at: int, tmp_path: Path) -> None:
    whole = SMALL.fit(algorithm)
    expected = [numbers(r) for r in whole]
    first = SMALL.fit(algorithm)
    begun = [numbers(next(first)) for _ in range(at)]
    first.save(tmp_path / "checkpoint.safetensors")
    second = SMALL.fit(algorithm)
    second.restore(tmp_path / "checkpoint.safetensors")
    assert begun + [numbers(r) for r in second] == expected
    assert same_bits(whole.params, second.params)


@every_algorithm
def test_inputs_are_never_changed(algorithm: Any) -> None:
    """Every function is called with inputs that are compared with copies afterwards."""

    class Guarded:
        def __getattr__(self, name: str) -> Any:
            function = getattr(algorithm, name)

            def guarded(*inputs: Any) -> Any:
                states = [part for part in inputs if isinstance(part, tuple | dict)]
                before = [[t.clone() for t in leaves_of(part)] for part in states]
                result = function(*inputs)
                for part, copies in zip(states, before, strict=True):
                    assert all(map(torch.equal, leaves_of(part), copies)), name
                return result

            return guarded

    def leaves_of(part: Any) -> list[torch.Tensor]:
        return list(part.values()) if isinstance(part, dict) else leaves(part)

    task = SMALL.task()
    start = {n: p.clone() for n, p in task.params.items()}
    list(fl.fit(Guarded(), task, clients=SMALL.clients(), rounds=4, batch_size=3))
    assert same_bits(start, task.params)


@every_algorithm
def test_states_and_messages_survive_the_wire(algorithm: Any) -> None:
    run = SMALL.fit(algorithm)
    next(run)
    client = run.store.state(run.plan.cohort(1)[0])
    for message in (run.server, algorithm.broadcast(run.server), client):
        record = pack(message)
        back = unpack(record, like=message)
        assert type(back) is type(message)
        assert {n: t.tolist() for n, t in pack(back).items()} == {
            n: t.tolist() for n, t in record.items()
        }


@every_algorithm
def test_converges_on_a_quadratic(algorithm: Any) -> None:
    """Least squares with the same solution on every client: the loss falls to a tenth."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=draw).double()
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]]).double()
    model = Small(kind="regression", inputs=3).module()
    model.weight.data, model.bias.data = model.weight.data[:1], model.bias.data[:1]
    task = fl.Task(model, train=(x, y), test=(x, y))
    before = task.evaluate(task.params, task.buffers)["test_loss"]
    run = fl.fit(algorithm, task, clients=fl.iid(60, 4), rounds=200, batch_size=15)
    best = min(r.metrics["test_loss"] for r in run)
    assert best < before / 10


@every_algorithm
def test_reports_are_only_averaged(algorithm: Any) -> None:
    """Every report of a round has the same trees, so any mean of them is again a report."""
    run = SMALL.fit(algorithm, fraction=1.0)
    for _ in range(4):
        reports: list[Any] = []
        add = RunningMean.add
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                RunningMean,
                "add",
                lambda self, upload, weight: (
                    reports.append(upload.report),
                    add(self, upload, weight),
                )[1],
            )
            done = next(run)
        shapes = [{n: t.shape for n, t in pack(report).items()} for report in reports]
        assert all(shape == shapes[0] for shape in shapes)
        assert done.uplink_bytes == sum(uplink_bytes(report) for report in reports)


@every_algorithm
def test_bytes_are_whole_models(algorithm: Any) -> None:
    run = SMALL.fit(algorithm)
    p = nbytes(run.params)
    for done in run:
        assert done.uplink_bytes % p == 0
        assert 1 <= done.uplink_bytes // p // len(done.clients) <= 2
        assert done.downlink_bytes % p == 0
        assert len(done.clients) <= done.downlink_bytes // p <= 2 * len(done.clients)


class Functional:
    """Gradients for vmap: by torch.func, the rows one more batched axis."""

    def __init__(self, task: fl.Task) -> None:
        self.task = task

    def minibatch(self, params: Any, buffers: Any, batch: Any) -> Any:
        x, y = (part[batch.rows] for part in self.task.train)

        def loss(p: fl.Tree) -> torch.Tensor:
            return self.task.loss(functional_call(self.task.model, p, (x,)), y)

        gradient, value = grad_and_value(loss)(params)
        return gradient, buffers, value

    def full(self, params: Any, buffers: Any, data: Any) -> Any:
        return self.minibatch(params, buffers, data)[0]


@every_algorithm
@pytest.mark.parametrize("sync_round", [1, 2])
def test_client_round_vectorises(algorithm: Any, sync_round: int) -> None:
    """vmap over clients gives what a loop gives, in round 1 and after it."""
    small = Small(sizes=(6, 6, 6), seed=2)
    run = small.fit(algorithm, batch_size=2, rounds=2)
    for _ in range(sync_round - 1):
        next(run)
    sent = algorithm.broadcast(run.server)
    rows = torch.stack(list(run.plan.clients))
    batches = torch.stack([torch.stack(run.plan.batches(sync_round, c)) for c in range(3)])
    states = [run.store.state(c) for c in range(3)]
    gradients = Functional(run.task)

    def one(state: Any, rows: Any, batches: Any) -> Any:
        steps = [Batch(rows) for rows in batches]
        outcome = local_round(algorithm, gradients, state, sent, {}, Batch(rows), steps)
        return outcome.client, outcome.report

    kind = type(states[0])
    stacked = kind(
        *({n: torch.stack([s[i][n] for s in states]) for n in f} for i, f in enumerate(states[0]))
    )
    with torch.no_grad():
        together = (
            vmap(one)(stacked, rows, batches)
            if leaves(stacked)
            else vmap(lambda r, b: one(states[0], r, b))(rows, batches)
        )
    loop = run._executor.gradients
    for c in range(3):
        steps = [Batch(b) for b in batches[c]]
        alone = local_round(algorithm, loop, states[c], sent, {}, Batch(rows[c]), steps)
        for part, expected in zip(together, (alone.client, alone.report), strict=True):
            for field, tree in zip(part, expected, strict=True):
                for name, tensor in tree.items():
                    assert torch.allclose(field[name][c], tensor, rtol=0, atol=1e-12)


@every_algorithm
def test_a_grid_of_rates_is_one_more_axis(algorithm: Any) -> None:
    """A rate may be a tensor, so three trials are one vmap over replace(algorithm, lr=...)."""
    run = SMALL.fit(algorithm)
    data, batches = Batch(run.plan.rows(1, 0)), [Batch(b) for b in run.plan.batches(1, 0)]
    gradients = Functional(run.task)
    params = run.params

    def trial(lr: Any) -> fl.Tree:
        changed = replace(algorithm, lr=lr)
        server = changed.server_init(params)
        sent = changed.broadcast(server)
        outcome = local_round(
            changed, gradients, changed.client_init(params), sent, {}, data, batches
        )
        return changed.server_update(server, outcome.report).params

    rates = [0.01, 0.02, 0.05]
    together = vmap(trial)(torch.tensor(rates, dtype=torch.float64))
    for i, lr in enumerate(rates):
        alone = trial(lr)
        assert all(torch.allclose(together[n][i], alone[n], rtol=0, atol=1e-12) for n in alone)
