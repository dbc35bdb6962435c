"""Loop and vectorised give the same trajectory: all methods, ragged clients, images, dropout."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedlamb as fl
from fedlamb.randomness import own_random_state
from fedlamb.tasks.models import build_model
from problems import Small

METHODS = {
    "fed-sgd": fl.FedSGD(lr=0.1),
    "adp-fed": fl.AdpFed(lr=0.1, server_lr=0.05),
    "fed-ams": fl.FedAMS(lr=0.01),
    "fed-lamb": fl.FedLAMB(lr=0.03, weight_decay=0.01),
    "mime": fl.Mime(lr=0.001, sync_every=3),
    "mime-lamb": fl.MimeLAMB(lr=0.03, layers="module"),
}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())


def close(one: fl.Run, two: fl.Run, tolerance: float = 1e-9) -> None:
    """The same metrics, traffic, model and client states."""
    for a, b in zip(one, two, strict=True):
        assert a.clients == b.clients
        assert (a.uplink_bytes, a.downlink_bytes) == (b.uplink_bytes, b.downlink_bytes)
        assert a.metrics == pytest.approx(b.metrics, rel=tolerance, abs=tolerance)
        for name in one.params:
            torch.testing.assert_close(
                one.params[name], two.params[name], rtol=tolerance, atol=tolerance
            )
    assert one.store.states.keys() == two.store.states.keys()
    for client, state in one.store.states.items():
        for mine, other in zip(state, two.store.states[client], strict=True):
            for name in mine:
                torch.testing.assert_close(mine[name], other[name], rtol=tolerance, atol=tolerance)


@every_method
@pytest.mark.parametrize("sizes", [(6, 6, 6, 6, 6), (7, 4, 9, 1, 12)], ids=["equal", "ragged"])
@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_loop_and_vectorised_agree_over_ten_rounds(method: Any, sizes: Any, weighting: str) -> None:
    small = Small(sizes=sizes, rounds=10)
    options = {"batch_size": 3, "epochs": 2, "fraction": 0.7, "weighting": weighting}
    close(
        small.fit(method, executor="loop", **options),
        small.fit(method, executor="vectorised", **options),
    )


def small_cnn() -> nn.Module:
    return build_model("cnn", (1, 16, 16), 4)


def with_batch_norm() -> nn.Module:
    layers = (nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(588, 4))
    return nn.Sequential(*layers)


def image_run(method: Any, executor: str, build: Any, **options: Any) -> fl.Run:
    with own_random_state(torch.device("cpu")):
        model = build()
    draw = np.random.default_rng(0)
    x = draw.integers(256, size=(60, 1, 16, 16), dtype=np.uint8)
    y = draw.integers(4, size=60)
    task = fl.Task(
        model.double(), (x, y), (x[:9], y[:9]), inputs=fl.Images((120.0,), (60.0,), crop=2)
    )
    given = {"clients": fl.iid(60, 4), "rounds": 3, "batch_size": 7, "fraction": 0.75, **options}
    return fl.fit(method, task, executor=executor, **given)


@every_method
@pytest.mark.parametrize("ragged", [False, True])
def test_they_agree_with_convolutions_dropout_and_augmentation(method: Any, ragged: bool) -> None:
    clients = fl.dirichlet(np.arange(60) % 4, 4, 0.3, balanced=False) if ragged else fl.iid(60, 4)
    one, two = (
        image_run(method, executor, small_cnn, clients=clients)
        for executor in ("loop", "vectorised")
    )
    close(one, two)


@every_method
def test_they_agree_with_batch_norm_where_sizes_are_equal(method: Any) -> None:
    one, two = (
        image_run(method, executor, with_batch_norm, batch_size=5)
        for executor in ("loop", "vectorised")
    )
    close(one, two)
    assert one.buffers.keys() == two.buffers.keys()
    for name, buffer in one.buffers.items():
        torch.testing.assert_close(buffer, two.buffers[name], rtol=1e-9, atol=1e-9)


class Decides(nn.Module):
    """Goes by a number that it finds."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(256, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x.flatten(1) if float(x.norm()) > 0 else x.flatten(1) + 1)


class Chooses(Decides):
    """Has as many rows as it finds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x.flatten(1)[x.flatten(1).isfinite().all(1)].view(-1, 256))


@pytest.mark.parametrize("build", [Decides, Chooses])
def test_what_vmap_cannot_do_is_refused_by_name(build: type[nn.Module]) -> None:
    said = r"executor = 'vectorised': cannot run this model .*vmap.*\); use executor='loop'$"
    run = image_run(METHODS["fed-lamb"], "vectorised", build)
    with pytest.raises(fl.SettingError, match=said):
        next(run)
    trials = fl.sweep(
        METHODS["fed-sgd"], run.task, grid={"lr": [0.1, 0.2]}, clients=fl.iid(60, 4), rounds=1
    )
    with pytest.raises(fl.SettingError, match=said):
        next(trials)
    next(image_run(METHODS["fed-lamb"], "loop", build))


def test_ragged_clients_with_batch_norm_are_refused_by_name() -> None:
    clients = [range(20), range(20, 47), range(47, 60)]
    run = image_run(METHODS["fed-lamb"], "vectorised", with_batch_norm, clients=clients)
    with pytest.raises(fl.SettingError, match="executor = 'vectorised': cannot pad .*'loop'"):
        next(run)
    assert run.number == 0


@every_method
def test_chunks_of_clients_give_the_same(method: Any) -> None:
    small = Small(sizes=(7, 4, 9, 5, 12), rounds=3)
    whole, parts = (small.fit(method, executor="vectorised") for _ in range(2))
    parts._executor.stack._at_once = 2
    close(whole, parts)


@pytest.mark.parametrize("executor", ["loop", "vectorised"])
def test_a_vectorised_run_resumes_to_the_same_bits(tmp_path: Any, executor: str) -> None:
    small = Small(rounds=6)
    whole = list(small.fit(METHODS["fed-lamb"], executor=executor))
    first = small.fit(METHODS["fed-lamb"], executor=executor)
    next(first), next(first)
    first.save(tmp_path / "c")
    rest = small.fit(METHODS["fed-lamb"], executor=executor)
    rest.restore(tmp_path / "c")
    assert [r.metrics for r in rest] == [r.metrics for r in whole[2:]]


def test_out_of_memory_halves_the_chunk_and_says_so(monkeypatch: Any, capsys: Any) -> None:
    small = Small(sizes=(6,) * 5, rounds=2)
    run, plain = (small.fit(METHODS["fed-ams"], executor="vectorised") for _ in range(2))
    together = run._executor.stack._together
    tried = []

    def limited(trials: Any, *given: Any) -> Any:
        tried.append(len(trials[0].work))
        if tried[-1] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return together(trials, *given)

    monkeypatch.setattr(run._executor.stack, "_together", limited)
    close(run, plain)
    assert tried == [5, 2, 2, 1, 2, 2, 1]
    assert "out of device memory with 5 clients at once; trying 2" in capsys.readouterr().err
    monkeypatch.setattr(run._executor.stack, "_together", lambda *given: 1 / 0)

    def never(*given: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    fresh = small.fit(METHODS["fed-ams"], executor="vectorised")
    monkeypatch.setattr(fresh._executor.stack, "_together", never)
    with pytest.raises(fl.SettingError, match="even with one client at a time; use a smaller"):
        next(fresh)


def test_the_choice_is_told() -> None:
    run = Small().fit(METHODS["fed-sgd"])
    assert (run.executor, run.reason) == ("loop", "on a CPU")
    with pytest.raises(fl.SettingError, match="executor = 'fast': must be 'auto', 'loop'"):
        Small().fit(METHODS["fed-sgd"], executor="fast")
