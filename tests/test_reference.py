"""The library against independent NumPy loops, after every local step and server update."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedlamb as fl
from problems import Recorded, Small
from reference.methods import METHODS, Problem, Trace

TOLERANCE = 1e-10  # relative to the largest number of the tensor, or absolute below 1

RATE = {"fed-sgd": 0.1, "adp-fed": 0.1, "fed-ams": 0.01, "fed-lamb": 0.05, "mime": 0.01}
ADAPTIVE = ("fed-ams", "fed-lamb", "mime", "mime-lamb")
LAMB = ("fed-lamb", "mime-lamb")


def by_first_digit(name: str) -> str:
    return name[0]


@st.composite
def problems(draw: st.DrawFn) -> Small:
    return Small(
        kind=draw(st.sampled_from(["mlp", "softmax", "regression"])),
        sizes=tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))),
        inputs=draw(st.integers(1, 5)),
        seed=draw(st.integers(0, 2**16)),
        rounds=draw(st.integers(1, 4)),
        federation={
            "fraction": draw(st.sampled_from([0.3, 0.5, 0.7, 1.0])),
            "batch_size": draw(st.integers(1, 10)),
            "epochs": draw(st.integers(1, 2)),
            "weighting": draw(st.sampled_from(["uniform", "examples"])),
        },
    )


@st.composite
def hyperparameters(draw: st.DrawFn, method: str) -> dict[str, Any]:
    some: dict[str, Any] = {"lr": RATE.get(method, 0.05) * draw(st.sampled_from([0.3, 1.0, 2.0]))}
    if draw(st.booleans()):
        some["schedule"] = fl.StepDecay(after=(1, 2), factor=draw(st.sampled_from([0.1, 0.5])))
    if method == "adp-fed":
        some["server_lr"] = draw(st.sampled_from([0.01, 0.1]))
    if method != "fed-sgd":
        some["beta1"] = draw(st.sampled_from([0.0, 0.5, 0.9]))
        some["beta2"] = draw(st.sampled_from([0.0, 0.9, 0.999]))
        some["eps"] = draw(st.sampled_from([1e-8, 1e-4, 1e-2]))
    if method in ADAPTIVE:
        some["first_round"] = draw(st.sampled_from(["local", "vhat"]))
        some["momentum"] = draw(st.sampled_from(["persist", "reset"]))
        some["sync_every"] = draw(st.sampled_from([1, 2, 3, 5]))
    if method in LAMB:
        some["weight_decay"] = draw(st.sampled_from([0.0, 0.01, 0.1]))
        some["layers"] = draw(st.sampled_from(["tensor", "module", by_first_digit]))
        some["phi_min"] = draw(st.sampled_from([0.0, 1e-3, 1.0]))
        some["phi_max"] = draw(st.sampled_from([1.0, 10.0, float("inf")]))
    return some


def reference(small: Small, method: str, hyper: dict[str, Any], run: fl.Run) -> Trace:
    """The NumPy trace on the same data, start, cohorts and batches."""
    x, y = small.data()
    problem = Problem(
        model=small.numpy_model(),
        x=x,
        y=y,
        clients=small.clients(),
        params={name: p.numpy().copy() for name, p in run.task.params.items()},
        cohorts=[run.plan.cohort(r) for r in range(1, small.rounds + 1)],
        batches=lambda r, client: [b.numpy() for b in run.plan.batches(r, client)],
        weighting=run.weighting,
    )
    plain = dict(hyper)
    if isinstance(plain.get("schedule"), fl.StepDecay):  # the reference decays by itself
        after, factor = plain["schedule"].after, plain["schedule"].factor
        plain["schedule"] = lambda r: factor ** len([at for at in after if at < r])
    return METHODS[method](problem, **plain)


def assert_close(ours: fl.Tree, theirs: dict[str, np.ndarray], what: str) -> None:
    assert list(ours) == list(theirs), what
    for name, tensor in ours.items():
        scale = max(1.0, float(np.abs(theirs[name]).max()))
        error = float(np.abs(tensor.numpy() - theirs[name]).max()) / scale
        assert error <= TOLERANCE, f"{what}, {name}: off by {error:.1e}"


def check(small: Small, method: str, hyper: dict[str, Any]) -> None:
    recorded = Recorded(fl.ALGORITHMS[method](**hyper))
    run = small.fit(recorded)
    rounds = list(run)
    trace = reference(small, method, hyper, run)

    assert len(recorded.locals) == len(trace.steps)
    for local, step in zip(recorded.locals, trace.steps, strict=True):
        where = f"{method}, round {step.round}, client {step.client}, step {step.t}"
        assert_close(local.x, step.x, f"{where}: x")
        if hasattr(local, "m"):
            assert_close(local.m, step.m, f"{where}: m")
        if getattr(local, "v", {}):  # Mime's clients run v only where they divide by it
            assert_close(local.v, step.v, f"{where}: v")

    assert len(recorded.servers) == len(trace.servers) == small.rounds
    for server, expected in zip(recorded.servers, trace.servers, strict=True):
        where = f"{method}, after round {expected.round}"
        assert_close(server.params, expected.params, f"{where}: params")
        if hasattr(server, "v_hat"):
            assert_close(server.v_hat.tree, expected.v_hat, f"{where}: v_hat")
        if method.startswith("mime"):
            assert_close(server.v, expected.V, f"{where}: V")
        if method == "adp-fed":
            assert_close(server.m, expected.m, f"{where}: m")
            assert_close(server.v, expected.v, f"{where}: v")

    for done in rounds:
        sent = [t for t in trace.traffic if t.round == done.number]
        assert [t.client for t in sent] == done.clients
        assert done.uplink_bytes == 8 * sum(t.up for t in sent)
        assert done.downlink_bytes == 8 * sum(t.down for t in sent)


@pytest.mark.parametrize("method", METHODS)
@given(data=st.data())
@settings(max_examples=120)
def test_agrees_with_reference_at_every_step(method: str, data: st.DataObject) -> None:
    check(data.draw(problems()), method, data.draw(hyperparameters(method)))


@pytest.mark.parametrize("sync_every", [1, 2, 3, 5])
@pytest.mark.parametrize("method", ADAPTIVE)
def test_long_lazy_runs_agree_with_reference(method: str, sync_every: int) -> None:
    """Long enough that every client misses a sync and comes back."""
    small = Small(sizes=(3, 5, 2, 4, 6), rounds=12, seed=5, federation={"fraction": 0.4})
    check(small, method, {"lr": RATE.get(method, 0.05), "sync_every": sync_every})


def test_no_gradient_of_the_reference_comes_from_autograd() -> None:
    """The two sides share the data, not the gradients: torch agrees with the hand-derived ones."""
    for kind in ("mlp", "softmax", "regression"):
        small = Small(kind=kind)
        x, y = small.data()
        task = small.task()
        module = small.module()
        task.loss(module(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        ours = {name: p.grad for name, p in module.named_parameters()}
        theirs = small.numpy_model().grad({n: p.numpy() for n, p in task.params.items()}, x, y)
        assert_close(ours, theirs, kind)
