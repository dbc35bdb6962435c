"""SPEC.md's seven exact facts, and for each one that it fails when the code is broken."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fedlamb as fl
from fedlamb import layerwise, trees
from fedlamb.algorithm import is_sync
from fedlamb.algorithms import fed_ams, fed_lamb, mime, mime_lamb
from fedlamb.plan import Plan
from fedlamb.simulate.running_mean import RunningMean
from problems import Recorded, Small

LAMB = (fl.FedLAMB, fl.MimeLAMB)
ADAPTIVE = (fl.FedAMS, fl.FedLAMB, fl.Mime, fl.MimeLAMB)
SMALL = Small(sizes=(6, 9, 4), rounds=4, seed=3)


def close(a: fl.Tree, b: fl.Tree, tolerance: float = 1e-12) -> bool:
    return all(torch.allclose(a[n], b[n], rtol=tolerance, atol=tolerance) for n in a)


def params_after(algorithm: Any, small: Small = SMALL, **changes: Any) -> fl.Tree:
    run = small.fit(algorithm, **changes)
    assert len(list(run)) == small.rounds
    return run.params


def steps_of(algorithm: Any) -> list[tuple[fl.Tree, fl.Tree]]:
    """(x before, x after) of every local step of a run."""
    pairs: list[tuple[fl.Tree, fl.Tree]] = []

    class Watched(Recorded):
        def client_step(self, local: Any, sent: Any, grad_at: Any) -> Any:
            after = super().client_step(local, sent, grad_at)
            pairs.append((local.x, after.x))
            return after

    list(SMALL.fit(Watched(algorithm)))
    return pairs


def fact_1_each_step_moves_each_layer_by_the_rate_times_phi() -> None:
    for method in LAMB:
        for low, high in ((1e-3, float("inf")), (2.0, 3.0)):
            for before, after in steps_of(method(lr=0.07, phi_min=low, phi_max=high)):
                for name in before:
                    moved = float((after[name] - before[name]).norm())
                    phi = min(max(float(before[name].norm()), low), high)
                    assert moved == pytest.approx(0.07 * phi, rel=1e-12)


def fact_2_norms_stay_within_powers_of_one_plus_minus_the_rate() -> None:
    a = 0.07
    for method in LAMB:
        recorded = Recorded(method(lr=a, phi_min=0.0))
        run = SMALL.fit(recorded, rounds=1, batch_size=2)
        start = run.params
        list(run)
        t = 0
        for client in run.plan.cohort(1):
            for number in range(1, len(run.plan.batches(1, client)) + 1):
                for name, x in recorded.locals[t].x.items():
                    ratio = float(x.norm() / start[name].norm())
                    assert (1 - a) ** number - 1e-12 <= ratio <= (1 + a) ** number + 1e-12
                t += 1
        assert t == len(recorded.locals) > 0


def fact_3_v_hat_never_decreases_and_is_never_below_eps() -> None:
    for method in ADAPTIVE:
        for every in (1, 2):
            recorded = Recorded(method(lr=0.01, eps=1e-3, beta2=0.5, sync_every=every))
            list(SMALL.fit(recorded, rounds=6))
            before = trees.full_like(SMALL.task().params, 1e-3)
            for server in recorded.servers:
                now = server.v_hat.tree
                assert all(bool((now[name] >= before[name]).all()) for name in now)
                before = now


def fact_4_round_1_does_not_depend_on_eps() -> None:
    for method in LAMB:
        results = [
            params_after(method(lr=0.05, eps=eps, first_round="vhat"), rounds=1, small=ONE_ROUND)
            for eps in (1e-8, 1e-4, 1.0)
        ]
        assert close(results[0], results[1])
        assert close(results[0], results[2])


ONE_ROUND = Small(sizes=(6, 9, 4), rounds=1, seed=3)


def fact_5_a_step_does_not_change_when_all_gradients_are_scaled() -> None:
    params = SMALL.task().params
    draw = torch.Generator().manual_seed(0)
    v_hat = {n: torch.rand(p.shape, generator=draw).double() + 0.1 for n, p in params.items()}
    for method in LAMB:
        results = []
        for scale in (1.0, 1e-3, 250.0):
            algorithm = method(lr=0.05)
            sent = algorithm.broadcast(algorithm.server_init(params))
            sent = sent._replace(own_v=False, v_hat=fl.Kept(1, v_hat))
            local = algorithm.client_begin(algorithm.client_init(params), sent, lambda x: params)
            gradients = torch.Generator().manual_seed(1)
            for _ in range(3):
                g = {
                    n: scale * torch.randn(p.shape, generator=gradients).double()
                    for n, p in params.items()
                }
                local = algorithm.client_step(local, sent, lambda x, g=g: g)
            results.append(local.x)
        assert close(results[0], results[1])
        assert close(results[0], results[2])


def fact_6_special_cases_coincide() -> None:
    # Z = 1 is no lazy sync: exactly as if every round were a sync whatever Z says.
    for method in ADAPTIVE:
        eager = params_after(method(lr=0.01, sync_every=1))
        with pytest.MonkeyPatch.context() as always:
            for module in (fed_ams, fed_lamb, mime, mime_lamb):
                always.setattr(module, "is_sync", lambda round, every: True)
            assert close(eager, params_after(method(lr=0.01, sync_every=3)))
    # n identical clients equal one client (full batches: only their order differs).
    for method in ADAPTIVE:
        rows = list(range(19))
        alone = params_after(method(lr=0.01), clients=[rows], batch_size=19)
        several = params_after(method(lr=0.01), clients=[rows] * 3, batch_size=19)
        assert close(alone, several)
    # A trust ratio of 1 turns the layer-wise methods into the plain ones.
    with pytest.MonkeyPatch.context() as ones:
        ones.setattr(layerwise, "trust_ratio", lambda x, u, low, high: torch.ones_like(x))
        assert close(params_after(fl.FedLAMB(lr=0.01)), params_after(fl.FedAMS(lr=0.01)))
        assert close(params_after(fl.MimeLAMB(lr=0.01)), params_after(fl.Mime(lr=0.01)))


def fact_7_the_order_of_the_clients_does_not_matter() -> None:
    cohort = Plan.cohort
    for method in (fl.FedSGD, *ADAPTIVE):
        for weighting in ("uniform", "examples"):
            forwards = params_after(method(lr=0.01), weighting=weighting)
            with pytest.MonkeyPatch.context() as turned:
                turned.setattr(Plan, "cohort", lambda self, r: cohort(self, r)[::-1])
                assert close(forwards, params_after(method(lr=0.01), weighting=weighting))


FACTS = [
    fact_1_each_step_moves_each_layer_by_the_rate_times_phi,
    fact_2_norms_stay_within_powers_of_one_plus_minus_the_rate,
    fact_3_v_hat_never_decreases_and_is_never_below_eps,
    fact_4_round_1_does_not_depend_on_eps,
    fact_5_a_step_does_not_change_when_all_gradients_are_scaled,
    fact_6_special_cases_coincide,
    fact_7_the_order_of_the_clients_does_not_matter,
]


@pytest.mark.parametrize("fact", FACTS, ids=lambda f: f.__name__)
def test_fact_holds(fact: Callable[[], None]) -> None:
    fact()


def ratio_without_phi(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(layerwise, "trust_ratio", lambda x, u, low, high: 1 / u)


def ratio_of_the_wrong_norm(patch: pytest.MonkeyPatch) -> None:
    whole = layerwise.trust_ratio
    patch.setattr(
        layerwise,
        "trust_ratio",
        lambda x, u, low, high: whole(x.norm().expand(x.shape), u, low, high),
    )


def ratio_doubled(patch: pytest.MonkeyPatch) -> None:
    whole = layerwise.trust_ratio
    patch.setattr(layerwise, "trust_ratio", lambda *args: 2 * whole(*args))


def v_hat_replaced_rather_than_maximised(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(trees, "maximum", lambda a, b: b)


def division_by_the_running_v(patch: pytest.MonkeyPatch) -> None:
    begin = fl.FedLAMB.client_begin
    patch.setattr(fl.FedLAMB, "client_begin", lambda *args: begin(*args)._replace(den={}))


def trust_ratio_left_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(layerwise, "trust_ratio", lambda x, u, low, high: torch.ones_like(x))


def sync_one_round_late(patch: pytest.MonkeyPatch) -> None:
    for module in (fed_ams, fed_lamb, mime, mime_lamb):
        patch.setattr(module, "is_sync", lambda round, every: is_sync(round, every + 1))


def reports_summed(patch: pytest.MonkeyPatch) -> None:
    def add(self: Any, report: Any, weight: float) -> None:
        summed = lambda a, b: {n: a[n] + b[n] for n in a}  # noqa: E731
        whole = lambda a, b: (  # noqa: E731
            summed(a, b)
            if isinstance(a, dict)
            else type(a)(*(whole(x, y) for x, y in zip(a, b, strict=True)))
        )
        self.value = report if self.value is None else whole(self.value, report)

    patch.setattr(RunningMean, "add", add)


def layerwise_step_too_long(patch: pytest.MonkeyPatch) -> None:
    for module in (fed_lamb, mime_lamb):
        patch.setattr(
            module, "layerwise_update", lambda x, psi, lr, *a: trees.add_scaled(x, -2 * lr, psi)
        )


def last_report_wins(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RunningMean, "add", lambda self, report, weight: setattr(self, "value", report))


BREAKS = [
    (FACTS[0], ratio_without_phi),
    (FACTS[0], ratio_of_the_wrong_norm),
    (FACTS[1], ratio_doubled),
    (FACTS[2], v_hat_replaced_rather_than_maximised),
    (FACTS[3], division_by_the_running_v),
    (FACTS[4], division_by_the_running_v),
    (FACTS[4], trust_ratio_left_out),
    (FACTS[5], sync_one_round_late),
    (FACTS[5], reports_summed),
    (FACTS[5], layerwise_step_too_long),
    (FACTS[6], last_report_wins),
]


@pytest.mark.parametrize(
    ("fact", "sabotage"), BREAKS, ids=[f"{f.__name__[:6]}-{s.__name__}" for f, s in BREAKS]
)
def test_fact_fails_when_the_code_is_broken(
    fact: Callable[[], None],
    sabotage: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sabotage(monkeypatch)
    with pytest.raises(AssertionError):
        fact()
