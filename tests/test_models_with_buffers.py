"""Batch norm, dropout, frozen and unused parameters inside a federation."""

import copy
import shutil

import pytest
import torch
from torch import nn

import fedlamb as fl
from fedlamb.tasks.images import Batch
from fedlamb.wire import nbytes


def build(*layers: nn.Module) -> nn.Module:
    """The layers with a start of their own that touches no global generator."""
    model = nn.Sequential(*layers).double()
    draw = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=draw, dtype=torch.float64) / 2
    return model


@pytest.fixture(autouse=True)
def layers_may_draw():
    with torch.random.fork_rng():
        yield


def data():
    draw = torch.Generator().manual_seed(1)
    return torch.randn(24, 4, generator=draw).double(), torch.randint(3, (24,), generator=draw)


def batch_norm_task() -> fl.Task:
    return fl.Task(
        build(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)), data(), data()
    )


CLIENTS = [list(range(10)), list(range(10, 16)), list(range(16, 24))]  # 3, 2 and 2 steps of 4


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_buffers_are_averaged_and_counters_take_the_largest(weighting):
    """Against plain PyTorch: one client after another, each from the same start."""
    task = batch_norm_task()
    run = fl.fit(
        fl.FedSGD(lr=0.1), task, clients=CLIENTS, rounds=1, batch_size=4, weighting=weighting
    )
    ends, steps = [], []
    for client in range(3):
        model = copy.deepcopy(task.model).train()
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = run.plan.batches(1, client)
        for rows in batches:
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(task.train[0][rows]), task.train[1][rows]).backward()
            optimiser.step()
        ends.append(model.state_dict())
        steps.append(len(batches))
    next(run)
    sizes = [10.0, 6.0, 8.0] if weighting == "examples" else [1.0, 1.0, 1.0]
    weights = [size / sum(sizes) for size in sizes]
    for name, value in {**run.params, **run.buffers}.items():
        if value.is_floating_point():
            mean = sum(w * end[name] for w, end in zip(weights, ends, strict=True))
            assert torch.allclose(value, mean, rtol=0, atol=1e-12), name
    assert run.buffers["1.num_batches_tracked"] == max(steps) == 3
    assert run.buffers["1.num_batches_tracked"].dtype == torch.int64


def test_buffers_are_counted_as_traffic_in_their_own_type():
    task = batch_norm_task()
    done = next(fl.fit(fl.FedSGD(lr=0.1), task, clients=CLIENTS, rounds=1))
    beside = 2 * 5 * 8 + 8  # mean and variance of five channels, one counter
    assert nbytes(task.buffers) == beside
    assert done.uplink_bytes == done.downlink_bytes == 3 * (nbytes(task.params) + beside)


def test_buffers_resume_to_the_same_bits(tmp_path):
    def start():
        return fl.fit(fl.MimeLAMB(lr=0.02), batch_norm_task(), clients=CLIENTS, rounds=4)

    whole, first, second = start(), start(), start()
    list(whole)
    next(first)
    first.save(tmp_path / "c")
    second.restore(tmp_path / "c")
    list(second)
    for name, value in whole.buffers.items():
        assert torch.equal(value, second.buffers[name])


def test_full_gradient_is_exact_whatever_the_chunks_and_leaves_buffers_alone(monkeypatch):
    task = batch_norm_task()
    run = fl.fit(fl.Mime(lr=0.001), task, clients=CLIENTS, rounds=1)
    rows = torch.arange(24)
    whole = run._executor.gradients.full(task.params, task.buffers, Batch(rows))
    monkeypatch.setattr("fedlamb.simulate.compiled_loop.sizes.CHUNK", 5)
    before = {n: b.clone() for n, b in task.buffers.items()}
    parts = run._executor.gradients.full(task.params, task.buffers, Batch(rows))
    model = copy.deepcopy(task.model).eval()
    nn.functional.cross_entropy(model(task.train[0]), task.train[1]).backward()
    for name, p in model.named_parameters():
        assert torch.allclose(whole[name], p.grad, rtol=0, atol=1e-12)
        assert torch.allclose(parts[name], p.grad, rtol=0, atol=1e-12)
    assert all(torch.equal(before[n], b) for n, b in task.buffers.items())


def test_dropout_is_drawn_from_the_plan():
    model = build(nn.Linear(4, 20), nn.Dropout(0.5), nn.Linear(20, 3))
    task = fl.Task(model, data(), data())

    def after(seed):
        run = fl.fit(fl.FedSGD(lr=0.1), task, clients=CLIENTS, rounds=2, batch_size=24, seed=seed)
        list(run)
        return run.params["0.weight"]

    one = after(0)
    torch.rand(5)  # whatever the caller draws
    assert torch.equal(one, after(0))
    # With full batches and all clients, only dropout can make the seeds differ.
    assert not torch.allclose(one, after(1), atol=1e-6)


def test_dropout_is_off_in_mime_s_full_gradient():
    model = build(nn.Linear(4, 20), nn.Dropout(0.5), nn.Linear(20, 3))
    task = fl.Task(model, data(), data())
    run = fl.fit(fl.Mime(lr=0.001), task, clients=CLIENTS, rounds=1)
    gradients = run._executor.gradients
    one = gradients.full(task.params, {}, Batch(torch.arange(24)))
    two = gradients.full(task.params, {}, Batch(torch.arange(24)))
    assert all(torch.equal(one[n], two[n]) for n in one)


def test_frozen_parameters_stay_and_do_not_travel():
    model = build(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].weight.requires_grad_(False)
    task = fl.Task(model, data(), data())
    assert list(task.params) == ["0.bias", "2.weight", "2.bias"]
    run = fl.fit(fl.FedLAMB(lr=0.05), task, clients=CLIENTS, rounds=3)
    list(run)
    assert torch.equal(run.model()[0].weight, model[0].weight)
    assert not torch.equal(run.model()[2].weight, model[2].weight)


def test_a_parameter_that_the_loss_does_not_reach_stays():
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = build(nn.Linear(4, 3))
            self.idle = nn.Parameter(torch.ones(2, dtype=torch.float64))

        def forward(self, x):
            return self.used(x)

    task = fl.Task(Idle(), data(), data())
    for algorithm in (fl.FedSGD(lr=0.1), fl.FedAMS(lr=0.01), fl.FedLAMB(lr=0.05)):
        run = fl.fit(algorithm, task, clients=CLIENTS, rounds=2)
        list(run)
        assert run.params["idle"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("method", [fl.FedLAMB, fl.MimeLAMB])
@pytest.mark.parametrize("first_round", ["local", "vhat"])
def test_a_zero_bias_trains(method, first_round):
    """Neither frozen, as under identity phi, nor exploding, as under a ratio of 1."""
    model = build(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    for layer in (model[0], model[2]):
        nn.init.zeros_(layer.bias)
    task = fl.Task(model, data(), data())
    run = fl.fit(
        method(lr=0.05, first_round=first_round), task, clients=CLIENTS, rounds=60, batch_size=4
    )
    losses = []
    for r in run:
        losses.append(r.metrics["test_loss"])
        largest = max(float(run.params[n].abs().max()) for n in ("0.bias", "2.bias"))
        assert 0 < largest < 3, f"round {r.number}"
    assert min(losses) < 0.75 * losses[0]
    frozen = fl.fit(method(lr=0.05, phi_min=0.0), task, clients=CLIENTS, rounds=5, batch_size=4)
    list(frozen)
    assert float(frozen.params["0.bias"].abs().max()) == 0  # what phi_min is there for


@pytest.mark.parametrize("method", [fl.FedSGD, fl.FedAMS, fl.FedLAMB, fl.MimeLAMB])
def test_resume_has_the_same_bits_whatever_the_memory_layout(method, tmp_path):
    """Channels-last weights and gradients sum in another order than plain ones."""
    draw = torch.Generator().manual_seed(2)
    x, y = torch.randn(24, 3, 6, 6, generator=draw), torch.randint(3, (24,), generator=draw)
    model = build(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(32, 3))
    model = model.float().to(memory_format=torch.channels_last)
    task = fl.Task(model, (x, y), (x, y))

    def start():
        return fl.fit(method(lr=0.01), task, clients=CLIENTS, rounds=5, batch_size=4)

    whole, first, second = start(), start(), start()
    list(whole)
    next(first), next(first)
    first.save(tmp_path / "c")
    second.restore(tmp_path / "c")
    list(second)
    assert all(torch.equal(p, second.params[n]) for n, p in whole.params.items())


def test_a_model_that_writes_on_its_inputs_or_counts_its_calls_does_no_harm():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = build(nn.ReLU(inplace=True), nn.Linear(4, 3))
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
            self.register_buffer("scratch", torch.zeros(1).double(), persistent=False)

        def forward(self, x):
            self.calls += 1
            self.scratch += 1
            return self.layer(x) * self.scratch  # 1 in every call, if it starts afresh

    x, y = data()
    kept = x.clone()
    task = fl.Task(Counting(), (x, y), (x, y))
    run = fl.fit(fl.Mime(lr=0.001), task, clients=CLIENTS, rounds=2, batch_size=24)
    list(run)
    assert torch.equal(x, kept)
    assert (
        int(run.buffers["calls"]) == 2
    )  # one step in each of two rounds; evaluation is not counted
    assert float(run._executor.gradients._afresh["scratch"]) == 0


def test_evaluation_draws_nothing_from_the_caller():
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = build(nn.Linear(4, 3))

        def forward(self, x):
            return self.layer(x) + torch.randn(len(x), 3)

    task = fl.Task(Noisy(), data(), data())
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one = task.evaluate(task.params, {})
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(3)
    assert one == task.evaluate(task.params, {})


def test_a_checkpoint_without_the_model_s_buffers_is_refused_and_changes_nothing(tmp_path):
    plain = fl.Task(build(nn.Linear(4, 5), nn.Linear(5, 3)), data(), data())
    first = fl.fit(fl.FedSGD(lr=0.1), plain, clients=CLIENTS, rounds=2)
    next(first)
    first.save(tmp_path / "c")
    model = build(nn.Linear(4, 5), nn.Linear(5, 3))
    model.register_buffer("more", torch.zeros(1))
    second = fl.fit(fl.FedSGD(lr=0.1), fl.Task(model, data(), data()), clients=CLIENTS, rounds=2)
    with pytest.raises(fl.SettingError, match="buffers are missing"):
        second.restore(tmp_path / "c")
    assert second.number == 0


class Smoothed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = build(nn.Linear(4, 3))
        self.register_buffer("mean", torch.zeros(4).double())

    def forward(self, x):
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        return self.layer(x - self.mean)


compiles = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to compile")
compiled = pytest.param("loop", True, marks=compiles)
torchs_own = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


@torchs_own
@pytest.mark.parametrize(("executor", "compile"), [("vectorised", False), compiled])
def test_a_buffer_put_in_the_place_of_another_counts_everywhere(executor, compile):
    task = fl.Task(Smoothed(), data(), data())
    options = {"clients": fl.iid(24, 3), "rounds": 3, "batch_size": 4}
    plain = fl.fit(fl.MimeLAMB(lr=0.1), task, executor="loop", **options)
    other = fl.fit(fl.MimeLAMB(lr=0.1), task, executor=executor, compile=compile, **options)
    for one, two in zip(plain, other, strict=True):
        assert two.metrics == pytest.approx(one.metrics, rel=1e-9)
    assert plain.buffers["mean"].abs().min() > 0
    torch.testing.assert_close(other.buffers, plain.buffers, rtol=1e-9, atol=1e-12)


class Noisy(nn.Module):
    """Draws from torch's generator, as a layer of one's own may."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = build(nn.Linear(4, 3))

    def forward(self, x):
        return self.layer(x + torch.rand_like(x) if self.training else x)


@torchs_own
@pytest.mark.parametrize(
    ("executor", "compile"),
    [("loop", False), ("vectorised", False), compiled,
     pytest.param("vectorised", True, marks=compiles)],
)  # fmt: skip
def test_layers_that_draw_go_on_to_the_same_bits_with_other_draws_in_each_round_and_under_each_seed(
    executor, compile, tmp_path
):
    alike = torch.ones(24, 4).double(), torch.zeros(24, dtype=torch.int64)
    task = fl.Task(Noisy(), alike, data())

    def run(seed=0, **options):
        given = {"clients": fl.iid(24, 3), "rounds": 4, "batch_size": 4, "seed": seed, **options}
        return fl.fit(fl.FedSGD(lr=1e-12), task, executor=executor, compile=compile, **given)

    whole, later = run(), run()
    losses = []
    for done in whole:
        losses.append(done.metrics["train_loss"])
        if done.number == 2:
            whole.save(tmp_path / "c")
    later.restore(tmp_path / "c")
    assert [r.metrics["train_loss"] for r in later] == losses[2:]
    losses += [r.metrics["train_loss"] for r in run(seed=1)]
    assert len({round(loss, 9) for loss in losses}) == 8


def test_a_buffer_that_is_put_in_the_place_of_another_counts():
    x, _ = data()
    run = fl.fit(
        fl.FedSGD(lr=0.1), fl.Task(Smoothed(), data(), data()), clients=[range(24)], rounds=1
    )
    next(run)
    assert torch.allclose(run.buffers["mean"], x.mean(0) / 2, atol=1e-12)
    metrics = run.task.evaluate(run.params, run.buffers)
    assert metrics != run.task.evaluate(run.params, run.task.buffers)
    assert torch.equal(run.model().mean, run.buffers["mean"])
