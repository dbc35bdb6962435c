"""`fedlamb theory`: what it runs is the library's algorithms, what it reports is what it ran."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fedlamb as fl
from fedlamb.cli import theory as command
from fedlamb.reproduce.theory import counterexample, figure, measured, slopes
from fedlamb.reproduce.theory.experiments import EXPERIMENTS, Experiment, Setting

SMALL = Setting(n=4, R=6, T=2, h=2, p=6)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def one_by_one(
    algorithm: Any, start: torch.Tensor, centres: torch.Tensor, rounds: int, steps: int
) -> Any:
    """One seed's server state by plain loops: a tensor for each layer, a client after the other."""
    split = lambda x: {f"layer{i}": x[i] for i in range(len(x))}  # noqa: E731
    server = algorithm.server_init(split(start))
    clients = [algorithm.client_init(server.params) for _ in centres]
    for _ in range(rounds):
        sent = algorithm.broadcast(server)
        reports = []
        for i, centre in enumerate(map(split, centres)):
            grad_at = lambda x: {k: measured.gradient(x[k], centre[k]) for k in x}  # noqa: E731
            local = algorithm.client_begin(clients[i], sent, grad_at)
            for _ in range(steps):
                local = algorithm.client_step(local, sent, grad_at)
            clients[i], report = algorithm.client_end(local, sent)
            reports.append(report)
        mean = (
            {k: torch.stack([tree[k] for tree in trees]).mean(0) for k in trees[0]}
            for trees in zip(*reports, strict=True)
        )
        server = algorithm.server_update(server, type(reports[0])(*mean))
    return server


@pytest.mark.parametrize(
    "algorithm", [fl.FedLAMB(lr=0.1), fl.FedLAMB(lr=0.1, sync_every=2), fl.FedAMS(lr=0.01)]
)
def test_all_at_once_equals_one_layer_one_client_one_seed_after_another(algorithm):
    random = torch.Generator().manual_seed(1)
    start = torch.randn(2, 1, 3, 4, generator=random, dtype=torch.float64)
    centres = torch.randn(2, 5, 3, 4, generator=random, dtype=torch.float64)
    *_, last = measured.trajectory(algorithm, start, centres, measured.gradient, rounds=4, steps=3)
    for seed in range(2):
        expected = one_by_one(algorithm, start[seed, 0], centres[seed], rounds=4, steps=3)
        for layer in range(3):
            for found, right in (
                (last.params, expected.params),
                (last.v_hat.tree, expected.v_hat.tree),
            ):
                assert torch.allclose(found["x"][seed, 0, layer], right[f"layer{layer}"], 1e-12, 0)


def test_the_gradient_is_the_loss_s():
    x = tensor(-2.0, 0.3, 1.5).requires_grad_()
    u = x - 0.7
    (expected,) = torch.autograd.grad((u**2 / (1 + u**2)).sum(), x)
    assert torch.allclose(measured.gradient(x.detach(), tensor(0.7)), expected, 1e-14, 0)


def test_noise_has_the_stated_variance_and_every_step_draws_anew(monkeypatch):
    drawn = []

    def watched(*args, noise, steps, **options):
        drawn.extend(noise() for _ in range(200))
        return iter(
            [SimpleNamespace(params={"x": args[1]}, v_hat=SimpleNamespace(tree={"x": one}))]
        )

    one = torch.ones(())
    monkeypatch.setattr(measured, "trajectory", watched)
    measured.measure(replace(SMALL, sigma=0.5), seeds=2)
    noise = torch.stack(drawn)
    assert torch.equal(noise.abs(), torch.full_like(noise, 0.5))
    assert abs(float(noise.mean())) < 0.02
    assert not torch.equal(noise[0], noise[1])
    assert not torch.equal(noise[:, 0], noise[:, 1])


def test_a_seed_s_numbers_do_not_depend_on_how_many_seeds_there_are():
    two, three = (measured.measure(SMALL, seeds) for seeds in (2, 3))
    assert torch.equal(two.plain, three.plain[:2])
    assert torch.equal(two.weighted, three.weighted[:2])
    assert two.plain[0] != two.plain[1]


def test_left_sides_by_hand():
    """Two clients centred at 1 and 3, so the mean's gradient at x is x - 2."""
    states = [
        SimpleNamespace(params={"x": tensor(x).reshape(1, 1, 1, 1)}, v_hat=SimpleNamespace(tree=v))
        for x, v in ((5.0, {"x": tensor(16.0)}), (3.0, {"x": tensor(4.0)}))
    ]
    found = measured.left_sides(states, tensor(1.0, 3.0).reshape(1, 2, 1, 1), measured.quadratic)
    assert float(found.plain) == (9 + 1) / 2
    assert float(found.weighted) == (9 / 4 + 1 / 2) / 2


def test_the_right_side_by_hand():
    """sqrt(9 * 4 / 4) * 2 / (2 * 0.5 * 3) + 4 * 0.5 * 9 / 0.1 + 4 * 0.5 * 3"""
    found = counterexample.right_side(
        n=4, rounds=3, h=2, p=4, alpha=0.5, bound=3, delta=2, eps=0.01
    )
    assert found == pytest.approx(2 + 180 + 6)


def test_the_rate_is_the_corollary_s():
    assert Setting(c=4.0, h=4, R=100, n=16).alpha == pytest.approx(4 / 20)
    assert Setting(c=4.0, h=4, R=100, n=16, grows_with_n=True).alpha == pytest.approx(4 * 4 / 20)
    assert Setting(R=100).algorithm().lr == Setting(R=100).alpha


def test_without_noise_identical_clients_are_one_client():
    one, four = (measured.measure(replace(SMALL, sigma=0.0, n=n), 2) for n in (1, 4))
    assert torch.allclose(one.plain, four.plain, 1e-9, 0)
    differ = measured.measure(replace(SMALL, sigma=0.0, heterogeneity=1.0), 2)
    assert not torch.allclose(one.plain, differ.plain, 1e-2, 0)


def test_fed_lamb_goes_to_the_median_and_fed_ams_to_the_mean(monkeypatch):
    monkeypatch.setattr(counterexample, "MEDIAN_ROUNDS", 1100)
    ends = {
        (line["experiment"], line["settings"]["method"]): line for line in counterexample.median()
    }
    for name, mean in (("median", 1.0), ("median-shifted", 11.0)):
        lamb, ams = ends[name, "fed-lamb"], ends[name, "fed-ams"]
        assert lamb["x"][0] == ams["x"][0] == mean + 1
        assert lamb["x"][-1] == pytest.approx(mean - 1, abs=0.1)
        assert lamb["gradient"] == pytest.approx(-1, abs=0.1)
        assert ams["x"][-1] == pytest.approx(mean, abs=1e-4)
        assert ams["gradient"] == pytest.approx(0, abs=1e-4)


def test_theorem_1_fails_on_three_quadratics_and_its_bound_on_gradients_holds(monkeypatch):
    monkeypatch.setattr(counterexample, "SIDES_ROUNDS", (100, 3500))
    short, long = counterexample.sides()
    assert short["weighted"] < short["right"]
    assert long["weighted"] > 1.2 * long["right"]
    assert max(short["largest_gradient"], long["largest_gradient"]) <= 3.1


def test_slopes_and_intervals_by_hand():
    assert slopes.slope([1, 10, 100], [5, 0.5, 0.05]) == pytest.approx(-1)
    assert slopes.interval([1, 2, 3]) == pytest.approx((2, 4.303 / 3**0.5))
    for freedom, point in ((1, 12.706), (9, 2.262), (10, 2.228), (19, 2.093), (60, 2.000)):
        assert slopes.t95(freedom) == pytest.approx(point, abs=1e-3)


def lines_of(experiment: Experiment, values: dict[int, float]) -> list[measured.Line]:
    return [
        {
            "experiment": experiment.name,
            "settings": {experiment.axis: at},
            "seed": seed,
            "plain": value * (1 + seed),
            "weighted": value,
        }
        for at, value in values.items()
        for seed in range(3)
    ]


@pytest.mark.parametrize(
    ("values", "holds"),
    [
        ({1: 1.0, 4: 0.5, 16: 0.25}, True),
        ({1: 1.0, 4: 0.25, 16: 1 / 16}, True),  # faster than an upper bound
        ({1: 1.0, 4: 0.8, 16: 0.64}, False),
        ({1: 1.0, 4: 0.1, 16: 0.1}, False),  # steep on the whole, flat in the end
    ],
)
def test_verdicts_are_about_upper_bounds(values, holds):
    experiment = next(e for e in EXPERIMENTS if e.name == "n")
    plain, weighted = slopes.verdicts(lines_of(experiment, values))
    assert (plain.measure, plain.predicted, plain.holds) == ("plain", -0.5, holds)
    assert (weighted.measure, weighted.predicted, weighted.holds) == ("weighted", 0.0, True)


def test_a_wide_interval_is_no_evidence():
    experiment = next(e for e in EXPERIMENTS if e.name == "n")
    lines = lines_of(experiment, {1: 1.0, 4: 0.5})
    for line in lines:
        line["plain"] **= line["seed"]
    assert not slopes.verdicts(lines)[0].holds


def test_experiments_differ_only_in_the_letter_they_vary():
    assert len({e.name for e in EXPERIMENTS}) == len(EXPERIMENTS)
    assert {e.axis for e in EXPERIMENTS} == {"n", "R", "T", "h", "Z"}
    for experiment in EXPERIMENTS:
        points = experiment.points()
        assert [getattr(s, experiment.axis) for s in points] == sorted(experiment.values)
        assert len({replace(s, **{experiment.axis: 1}) for s in points}) == 1
        assert all(s.p % s.h == 0 for s in points)


def test_the_command_writes_lines_and_draws_from_them(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    few = tuple(replace(e, setting=SMALL, values=(1, 2)) for e in EXPERIMENTS[2:3])
    for module in (slopes, figure, command):
        monkeypatch.setattr(module, "EXPERIMENTS", few)
    monkeypatch.setattr(counterexample, "MEDIAN_ROUNDS", 5)
    monkeypatch.setattr(counterexample, "SIDES_ROUNDS", (5, 10))
    command.theory(seeds=2, out=tmp_path / "new")
    lines = [json.loads(text) for text in (tmp_path / "new/theory.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * 2 * len(few) + 4 + 2
    assert {"experiment", "settings", "seed"} < set(lines[0])
    shown = capsys.readouterr().out
    assert shown.count("as predicted") == 2 * len(few) + 2
    (tmp_path / "again").mkdir()
    for path in figure.draw(lines, tmp_path / "again"):
        assert path.read_bytes() == (tmp_path / "new" / path.name).read_bytes()


def test_without_matplotlib_it_says_so_before_it_starts(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(fl.SettingError, match="matplotlib"):
        command.theory(seeds=2, out=tmp_path / "new")
    assert not (tmp_path / "new").exists()
