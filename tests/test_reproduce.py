"""Reproduction: panels as the paper has them, tuning by its stated rule, results that last."""

import json
import subprocess
import sys
from dataclasses import replace
from itertools import groupby, product
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fedlamb.cli import app
from fedlamb.errors import SettingError
from fedlamb.reproduce import panels, study, trials
from fedlamb.reproduce.panels import PANELS, Curve, Panel, panels_of
from fedlamb.reproduce.results import Results, choose, of_curve
from fedlamb.reproduce.running import experiment_of, run_groups
from fedlamb.reproduce.side_by_side import Workers
from fedlamb.reproduce.study import (
    Group,
    Wanted,
    beside_the_best,
    horizon,
    next_groups,
    survivors,
)
from fedlamb.reproduce.trials import Bench
from fedlamb.settings import validate
from fedlamb.simulate.sweep import Together
from fedlamb.simulate.vectorised import Stack

ENGINE = {"device": "cpu", "compile": False, "root": None}


def nobody(*now: Any) -> None:
    """Progress that nobody watches."""


def test_every_panel_has_valid_settings_and_the_papers_protocol() -> None:
    assert len({panel.id for panel in PANELS}) == len(PANELS)
    for panel in PANELS:
        for curve in panel.curves:
            values = {key: options[0] for key, options in curve.grid().items()}
            validate({**panel.settings, "algorithms": {curve.method: values}})
    assert [p.name for p in panels_of("fig2")] == [p.name for p in panels_of("fig3")]
    assert {p.settings["split"]["kind"] for p in panels_of("fig2")} == {"iid"}
    assert {p.settings["split"]["kind"] for p in panels_of("fig3")} == {"shards"}
    lazy = panels_of("fig5", "mnist-cnn-lazy")[0]
    assert [c.fixed["sync_every"] for c in lazy.curves] == [1, 3, 5, 1, 3, 5]
    many = panels_of("fig6")[0].settings
    assert (many["split"]["clients"], many["federation"]["batch_size"]) == (200, 64)
    assert panels_of("table1") == panels_of("fig4")
    resnet = panels_of("fig4")[0]
    assert resnet.rounds == 100
    assert resnet.narrow
    for curve in resnet.curves:  # a part of the paper's grid, at least five points of it
        points, narrow = curve.grid(), curve.grid(narrow=True)
        assert all(set(narrow[key]) <= set(points[key]) for key in narrow if key != "schedule")
        assert len(narrow["lr"]) * len(narrow.get("server_lr", [0])) >= 5
    assert all(c.fixed["schedule"] == {"after": [30, 70]} for c in resnet.curves)


def test_the_grids_are_the_papers() -> None:
    sizes = dict.fromkeys(panels.METHODS, 1)
    for method in sizes:
        for values in Curve(method).grid().values():
            sizes[method] *= len(values)
    assert sizes == {
        "fed-sgd": 9, "fed-ams": 10, "mime": 10, "adp-fed": 120, "fed-lamb": 27, "mime-lamb": 27
    }  # fmt: skip


def test_a_wrong_name_is_told() -> None:
    with pytest.raises(SettingError, match="fig2"):
        panels_of("fig7")
    with pytest.raises(SettingError, match="mnist-mlp-1"):
        panels_of("fig2", "mnist-mlp")


def line(lr: float, *accuracies: float, seed: int = 0, rounds: int = 0, **more: Any) -> Any:
    return {
        "method": "fed-sgd",
        "values": {"lr": lr},
        "seed": seed,
        "rounds": rounds or len(accuracies),
        "select": "test",
        "test_accuracy": list(accuracies),
        **more,
    }


def kept(*lines: Any) -> list[tuple[float, ...]]:
    return [tuple(values.values()) for values in survivors(lines, "test")]


def test_near_points_three_rates_and_the_next_lower_one_go_on() -> None:
    assert kept(*(line(lr, a) for lr, a in ((1, 0.5), (2, 0.9), (3, 0.7), (4, 0.8)))) == [
        (2,), (4,), (3,), (1,)
    ]  # fmt: skip
    assert kept(*(line(lr, 0.9 - lr / 10) for lr in range(6))) == [(0,), (1,), (2,)]
    assert kept(*(line(float(lr), 0.9) for lr in range(9))) == [(lr,) for lr in range(6)]
    assert len(kept(*(line(lr, 0.9 - lr / 1000) for lr in range(5)))) == 5
    decayed = [
        line(lr, a - d / 100, values={"lr": lr, "weight_decay": d})
        for lr, a in ((0.01, 0.95), (0.03, 0.97), (0.05, 0.96), (0.1, 0.6))
        for d in (0.0, 0.1)
    ]
    assert kept(*decayed) == [(0.03, 0.0), (0.03, 0.1), (0.05, 0.0), (0.01, 0.0)]
    assert kept(line(1.0, 0.2, 0.9, 0.1), line(2.0, 0.8, 0.8, 0.8))[0] == (1.0,)  # the best round


def test_the_next_rates_to_either_side_of_the_best_whole_run_are_tried() -> None:
    first = [line(lr, a) for lr, a in ((1, 0.9), (2, 0.85), (3, 0.8), (4, 0.75), (5, 0.3))]

    def more(*whole: tuple[float, float]) -> list[float]:
        lines = [line(lr, a, rounds=9) for lr, a in whole]
        return [values["lr"] for values in beside_the_best(first, lines, "test")]

    assert more((1, 0.95), (2, 0.96)) == [3]
    assert more((1, 0.95), (2, 0.96), (3, 0.97)) == [4]
    assert more((3, 0.97)) == [2, 4]
    assert more((1, 0.95), (2, 0.96), (3, 0.95)) == []
    assert more((3, 0.95), (4, 0.96)) == []  # 5 was far behind


def test_both_rates_have_neighbours_and_the_best_decay_of_each_goes_on() -> None:
    first = [
        line(lr, 0.9 - s / 10 - d, values={"lr": lr, "server_lr": s, "weight_decay": d})
        for lr in (1, 2, 3) for s in (0.1, 0.2) for d in (0.0, 0.1)
    ]  # fmt: skip
    whole = [line(2, 0.9, values={"lr": 2, "server_lr": 0.1, "weight_decay": 0.1})]
    found = [tuple(values.values()) for values in beside_the_best(first, whole, "test")]
    assert found == [(1, 0.1, 0.0), (3, 0.1, 0.0), (2, 0.2, 0.0)]


def test_the_choice_is_the_best_mean_among_points_with_all_seeds() -> None:
    lines = [
        line(1.0, 0.99, rounds=5),  # only the grid's stage
        *(line(2.0, a, 0.1, seed=s, rounds=10) for s, a in enumerate((0.7, 0.9))),
        *(line(3.0, a, 0.9, seed=s, rounds=10) for s, a in enumerate((0.8, 0.85))),
        line(4.0, 0.99, 0.99, rounds=10),  # only one seed
    ]
    chosen = choose(lines, 10, "test")
    assert chosen is not None
    assert chosen.values == {"lr": 3.0}  # 0.9, before 0.8
    assert (chosen.tried, chosen.runs) == (4, 6)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Panel:
    settings = {
        "data": {"name": "digits"},
        "split": {"kind": "iid", "clients": 4, "allocation": "per_round"},
        "model": {"name": "mlp", "hidden": [4]},
        "federation": {"rounds": 10, "fraction": 0.5, "batch_size": 128},
    }
    panel = Panel("fig2", "digits", "Digits", settings, (Curve("fed-sgd"), Curve("fed-ams")))
    monkeypatch.setattr(panels, "PANELS", (panel,))
    return panel


def without_time(folder: Path, panel: Panel) -> list[str]:
    trials = Results(folder).trials(panel).values()
    kept = [{k: v for k, v in t.items() if k not in ("seconds", "session")} for t in trials]
    return sorted(json.dumps(trial, sort_keys=True) for trial in kept)


def test_reproduce_tunes_runs_and_shows_and_does_nothing_twice(
    small: Panel, tmp_path: Path
) -> None:
    told = CliRunner().invoke(app, ["reproduce", "fig2", "--dry-run", "--results", str(tmp_path)])
    assert told.exit_code == 0, told.output
    assert "To be run" in told.output
    assert all(curve.label in told.output for curve in small.curves)
    assert list(tmp_path.iterdir()) == []
    options = ["reproduce", "fig2", "--seeds", "2", "--device", "cpu", "--results"]
    done = CliRunner().invoke(app, [*options, str(tmp_path / "whole")])
    assert done.exit_code == 0, done.output
    results = Results(tmp_path / "whole")
    trials = results.trials(small)
    of_sgd = of_curve(trials, small.curves[0], "test")
    assert sum(x["rounds"] == horizon(10) for x in of_sgd) == 9
    assert sum(x["rounds"] == 10 for x in of_sgd) >= 6
    assert {x["seed"] for x in of_sgd if x["rounds"] == 10} == {0, 1}
    assert all(len(x["test_accuracy"]) == x["rounds"] for x in of_sgd)
    assert "fed-sgd" in done.output
    assert "tuning" in done.output.split("Digits")[-1]  # the last column has its place
    two = CliRunner().invoke(app, [*options, str(tmp_path / "two"), "--workers", "2"])
    assert two.exit_code == 0, two.output
    assert without_time(tmp_path / "two", small) == without_time(tmp_path / "whole", small)
    before = results.path(small).read_bytes()
    again = CliRunner().invoke(app, [*options, str(tmp_path / "whole")])
    assert results.path(small).read_bytes() == before
    assert again.output.split("Digits")[-1] == done.output.split("Digits")[-1]


@pytest.mark.parametrize(("second", "near"), [(0.86, False), (0.88, True)])
def test_of_a_narrow_panel_the_best_point_goes_on_and_a_second_that_is_near(
    small: Panel, tmp_path: Path, second: float, near: bool
) -> None:
    panel = replace(small, narrow=True)
    wanted, results = Wanted(panel, panel.curves[:1], 20, 2, "test", True), Results(tmp_path)
    (first,) = next_groups(wanted, results)
    assert (first.rounds, [v["lr"] for v, _ in first.points]) == (2, [0.03, 0.05, 0.1, 0.3, 0.5])
    accuracies = {0.1: 0.9, 0.3: second, 0.5: second - 0.001}
    for values, seed in first.points:
        results.append(panel, line(values["lr"], 0.1, accuracies.get(values["lr"], 0.8), seed=seed))
    if near:
        (whole,) = next_groups(wanted, results)
        assert (whole.rounds, whole.points) == (20, [({"lr": 0.1}, 0), ({"lr": 0.3}, 0)])
        results.append(panel, line(0.1, *[0.95] * 20))
        results.append(panel, line(0.3, *[0.96] * 20))
        (final,) = next_groups(wanted, results)
        assert (final.rounds, final.points) == (20, [({"lr": 0.3}, 1)])
    else:
        (final,) = next_groups(wanted, results)
        assert (final.rounds, final.points) == (20, [({"lr": 0.1}, 0), ({"lr": 0.1}, 1)])


def test_the_three_best_whole_runs_go_on_under_the_other_seeds(
    small: Panel, tmp_path: Path
) -> None:
    wanted, results = Wanted(small, small.curves[:1], 10, 3, "test", True), Results(tmp_path)
    rates = small.curves[0].grid()["lr"]
    for lr in rates:  # all alike at first, so that six go on
        results.append(small, line(lr, 0.8, 0.9))
    (whole,) = next_groups(wanted, results)
    assert (whole.stage, whole.rounds) == ("whole", 10)
    assert [(v["lr"], seed) for v, seed in whole.points] == [(lr, 0) for lr in rates[:6]]
    for number, lr in enumerate(rates[:6]):
        results.append(small, line(lr, *[0.5 + number / 100] * 10))
    (beside,) = next_groups(wanted, results)  # the best of them was the highest
    assert (beside.stage, beside.rounds, beside.points) == ("whole", 10, [({"lr": 0.1}, 0)])
    results.append(small, line(0.1, *[0.52] * 10))
    (final,) = next_groups(wanted, results)
    assert (final.stage, final.rounds) == ("final", 10)
    best = [0.05, 0.03, 0.01]
    assert [(v["lr"], seed) for v, seed in final.points] == [(a, s) for a in best for s in (1, 2)]
    for lr, seed in [(a, s) for a in best for s in (1, 2)]:
        results.append(small, line(lr, *[0.9 if lr == 0.03 else 0.6] * 10, seed=seed))
    assert next_groups(wanted, results) == []
    chosen = choose(of_curve(results.trials(small), small.curves[0], "test"), 10, "test")
    assert chosen is not None
    assert (chosen.values, chosen.tried, chosen.runs) == ({"lr": 0.03}, 9, 22)


def test_trials_that_differ_in_rates_alone_follow_each_other_and_share_programs(
    small: Panel, tmp_path: Path
) -> None:
    wanted = Wanted(small, (Curve("fed-lamb"),), 10, 1, "test", True)
    (group,) = next_groups(wanted, Results(tmp_path))
    decays = [values["weight_decay"] for values, _ in group.points]
    assert len(decays) == 27
    assert len(list(groupby(decays))) == 3
    bench, runs = Bench(Together()), []
    for values, seed in ({"lr": 0.1}, 0), ({"lr": 0.2}, 1):
        group = Group("fed-sgd", "", 2, [(values, seed)], "grid")
        experiment = experiment_of(small, group, seed, "test", ENGINE)
        (point,) = bench.points("fed-sgd", [(values, experiment)])
        bench.run_alone(point, tmp_path / f"{seed}", nobody)
        runs.append(point.run)
    one, two = (run._executor for run in runs)
    assert one.gradients is two.gradients
    assert runs[0].params["1.weight"].ne(runs[1].params["1.weight"]).any()


class Trials:
    """Two trials of six rounds, run together in folders of their own."""

    def __init__(self, panel: Panel, place: Path) -> None:
        group = Group("fed-ams", "", 6, [({"lr": lr}, 0) for lr in (0.001, 0.01)], "grid")
        self.experiment = experiment_of(panel, group, 0, "test", ENGINE)
        self.group, self.place = group, place
        self.seen: list[int] = []

    def run(self, name: str, stop: int | None = None) -> Any:
        """Accuracies and parameters afterwards; stopped after this round, nothing."""
        bench, self.seen = Bench(Together()), []
        given = [(values, self.experiment) for values, _ in self.group.points]
        points = bench.points("fed-ams", given)

        def on_round(number: int, total: int, best: float | None) -> None:
            self.seen.append(number)
            if number == stop:
                raise KeyboardInterrupt

        folders = [self.place / name / str(i) for i in range(2)]
        try:
            lines = bench.run_together(points, folders, on_round)
        except KeyboardInterrupt:
            return None
        return [
            ([(line["round"], line["test_accuracy"]) for line in of], point.run.params)
            for of, point in zip(lines, points, strict=True)
        ]


def assert_same(one: Any, two: Any, tolerance: float = 0.0) -> None:
    for (lines, params), (others, other_params) in zip(one, two, strict=True):
        assert lines == others
        for name, value in params.items():
            torch.testing.assert_close(other_params[name], value, rtol=0, atol=tolerance)


@pytest.mark.parametrize("saving", [0, 1])  # never but in the first round, or in each
def test_trials_together_go_on_where_they_were_stopped(
    saving: float, small: Panel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "_SAVING", saving)
    both = Trials(small, tmp_path)
    whole = both.run("whole")
    assert both.seen == [1, 2, 3, 4, 5, 6]
    assert both.run("stopped", stop=3) is None
    found = both.run("stopped")
    assert both.seen == [4, 5, 6]
    assert_same(whole, found)


def test_an_interrupt_between_two_programs_of_a_round_loses_none_that_is_done(
    small: Panel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "_SAVING", 0)
    both = Trials(small, tmp_path)
    points = [(values, both.experiment) for values, _ in both.group.points]
    bench = Bench(Together(at_once=1))
    calls, run = [], Stack.run

    def interrupted(*given: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 8:  # the second trial's fourth round
            raise KeyboardInterrupt
        return run(*given, **options)

    monkeypatch.setattr(Stack, "run", interrupted)
    folders = [tmp_path / "r" / str(i) for i in range(2)]
    with pytest.raises(KeyboardInterrupt):
        bench.run_together(bench.points("fed-ams", points), folders, lambda *given: None)
    lines = [(folder / "metrics.jsonl").read_text().splitlines() for folder in folders]
    assert [len(some) for some in lines] == [4, 3]


def test_trials_of_which_only_some_were_saved_go_on_to_rounding(
    small: Panel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "_SAVING", 1)
    both = Trials(small, tmp_path)
    whole = both.run("whole")
    both.run("killed", stop=3)
    # As after a kill: one trial has a line too many and half of another, the other no checkpoint.
    with (tmp_path / "killed/1/metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "test_accuracy": 1.0}\n{"rou')
    (tmp_path / "killed/0/checkpoint.safetensors").unlink()
    found = both.run("killed")
    assert both.seen == [4, 5, 6, 6, 6, 6]
    assert_same(whole, found, tolerance=1e-6)


@pytest.mark.parametrize("saving", [0, 1])
def test_one_trial_goes_on_where_it_was_stopped_and_leaves_no_states(
    saving: float, small: Panel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "_SAVING", saving)
    both = Trials(small, tmp_path)
    seen: list[int] = []

    def on_round(number: int, total: int, best: float | None) -> None:
        seen.append(number)
        if seen == [1, 2, 3]:
            raise KeyboardInterrupt

    for last in (False, True):
        bench = Bench(Together())
        (point,) = bench.points("fed-ams", [({"lr": 0.01}, both.experiment)])
        if last:
            bench.run_alone(point, tmp_path / "one", on_round)
            assert point.run.store.all() == {}
        else:
            with pytest.raises(KeyboardInterrupt):
                bench.run_alone(point, tmp_path / "one", on_round)
    assert seen == [1, 2, 3, 3, 4, 5, 6]  # told where it goes on


def test_tuned_rates_are_taken_curve_by_curve_and_the_best_known_are_kept(
    small: Panel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"fed-sgd": {"lr": 0.5}}
    monkeypatch.setattr(
        study, "tuned_values", lambda wanted, curve, results: known.get(curve.label)
    )
    wanted, results = Wanted(small, small.curves, 10, 2, "test", False), Results(tmp_path)
    sgd, ams = next_groups(wanted, results)
    assert (sgd.stage, sgd.points) == ("final", [({"lr": 0.5}, 0), ({"lr": 0.5}, 1)])
    assert (ams.stage, len(ams.points)) == ("grid", 10)
    monkeypatch.setattr(study, "PANELS", (small,))
    for lr in Curve("fed-sgd").grid()["lr"]:
        results.append(small, line(lr, 0.0, lr))
    results.append(small, line(0.5, *[0.9] * 10))
    best = {"fig2/digits": {"test": {"fed-sgd": {"lr": 0.5}}}}
    assert (study.tuned_table(results, 1), study.tuned_table(results, 2)) == (best, {})
    monkeypatch.setattr(study, "PANELS", (replace(small, narrow=True),))
    assert study.tuned_table(results, 2) == best  # a large model's with the seeds that there are
    assert study.chosen_values(small, small.curves[0], "test", 1, results) is None  # more go on
    for lr in (0.1, 0.3):
        results.append(small, line(lr, *[0.8] * 10))
    assert study.chosen_values(small, small.curves[0], "test", 1, results) == {"lr": 0.5}
    monkeypatch.undo()
    monkeypatch.setattr(study, "PANELS", (small,))
    taken = replace(small, name="taken", tuned_as=small.id)
    lazy = Curve("fed-sgd", {"weight_decay": 0.1})
    (group,) = next_groups(Wanted(taken, (lazy,), 10, 1, "test", False), results)
    assert group.points == [({"lr": 0.5, "weight_decay": 0.1}, 0)]
    with pytest.raises(SettingError, match="reproduce fig2 --panel digits --tune finds them"):
        next_groups(Wanted(taken, (Curve("mime"),), 10, 1, "test", False), results)
    fixed: dict[str, Any] = {"schedule": {"after": [30]}}
    lender = replace(small, name="lender", curves=(Curve("fed-sgd", fixed),))
    borrower = replace(lender, name="borrower", rates_from=lender.id)
    monkeypatch.setattr(study, "PANELS", (small, lender))
    tuned = [line(lr, 0.0, lr) for lr in Curve("fed-sgd").grid()["lr"]]
    tuned += [line(lr, *[0.4 + lr] * 10) for lr in (0.1, 0.3, 0.5)]
    for each in tuned:
        results.append(lender, each | {"values": {**each["values"], **fixed}})
    (group,) = next_groups(Wanted(borrower, borrower.curves, 10, 1, "test", False), results)
    assert group.points == [({"lr": 0.5, **fixed}, 0)]
    lent = replace(small, name="lent", rates_from=small.id)
    (group,) = next_groups(Wanted(lent, (lazy,), 10, 1, "test", False), results)
    assert group.points == [({"lr": 0.5, "weight_decay": 0.1}, 0)]
    for asked, method in ((True, "fed-sgd"), (False, "mime")):  # none to be lent: searched
        (group,) = next_groups(Wanted(lent, (Curve(method),), 10, 1, "test", asked), results)
        assert (group.stage, len(group.points)) == ("grid", len(Curve(method).grid()["lr"]))
    results.append(lent, line(0.1, *[0.9] * 10) | {"values": {"lr": 0.1, "weight_decay": 0.1}})
    (group,) = next_groups(Wanted(lent, (lazy,), 10, 1, "test", False), results)
    assert group.points == [({"lr": 0.5, "weight_decay": 0.1}, 0)]  # its own, tuned in part alone


def test_killed_anywhere_it_goes_on_to_the_same_results(small: Panel, tmp_path: Path) -> None:
    def go_on(folder: Path, dies_after: int | None = None) -> None:
        wanted = Wanted(small, small.curves[:1], 10, 2, "test", True)
        lines = 0

        def told(name: str, done: int, total: int, best: float | None) -> None:
            nonlocal lines
            lines += 1
            if lines == dies_after:
                raise KeyboardInterrupt

        results, bench = Results(folder), Bench(Together())
        while groups := next_groups(wanted, results):
            run_groups(wanted, groups, results, ENGINE, bench, told, nobody)

    go_on(tmp_path / "whole")
    for dies_after in (1, 5, 21, 40):
        with pytest.raises(KeyboardInterrupt):
            go_on(tmp_path / "broken", dies_after)
    path = Results(tmp_path / "broken").path(small)
    path.write_bytes(path.read_bytes()[:-7])  # a line cut short
    go_on(tmp_path / "broken")
    assert without_time(tmp_path / "broken", small) == without_time(tmp_path / "whole", small)
    assert list((tmp_path / "broken" / "partial").iterdir()) == []


def test_validation_holds_out_rows_and_decides_by_the_last_round(
    small: Panel, tmp_path: Path
) -> None:
    wanted = Wanted(small, small.curves[:1], 2, 1, "validation", True)
    results = Results(tmp_path)
    (group,) = next_groups(wanted, results)
    run_groups(wanted, [group], results, ENGINE, Bench(Together()), nobody, nobody)
    lines = list(results.trials(small).values())
    assert len(lines) == 9
    assert all(len(x["validation_accuracy"]) == 2 for x in lines)
    chosen = choose(lines, 2, "validation")
    assert chosen is not None
    best = max(lines, key=lambda x: x["validation_accuracy"][-1])
    assert chosen.values == best["values"]


def test_curves_of_one_method_are_told_apart_also_by_a_table() -> None:
    resnet = panels_of("fig4")[0].curves[0]
    values = {"lr": 0.1, "weight_decay": 0.0}
    same = line(0.1, 0.9, method="fed-lamb", values={**values, **resnet.fixed})
    other = line(0.1, 0.9, method="fed-lamb", values={**values, "schedule": {"after": [3]}})
    assert of_curve({"a": same, "b": other}, resnet, "test") == [same]


def test_every_figure_is_drawn_from_the_logs_alone(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "results").mkdir()
    panel = panels_of("fig2", "mnist-mlp-1")[0]
    results = Results(tmp_path / "results")
    for seed in range(3):
        for lr, accuracy in ((0.1, 0.9), (0.5, 0.97)):
            run = line(lr, *[accuracy - 0.001 * seed] * 50, seed=seed)
            results.append(panel, run)
    results.append(panel, {**line(0.01, *[0.5] * 10), "method": "fed-ams"})
    results.append(panel, {**line(0.01, *[0.5] * 50), "method": "mime"})
    results.append(panel, {**line(0.01, *[0.9] * 49, 0.1), "method": "mime-lamb"})
    resnet = panels_of("fig4", "tiny-resnet18")[0]
    few = {**line(0.05, 0.1, 0.2), "values": {"lr": 0.05, **resnet.curves[2].fixed}}
    results.append(resnet, few)
    lazy = panels_of("fig5", "mnist-cnn-lazy")[0]
    values = {"lr": 0.01, "weight_decay": 0.0, "sync_every": 3}
    results.append(lazy, {**line(0.01, *[0.5] * 4), "method": "fed-lamb", "values": values})
    script = Path(__file__).parent.parent / "paper" / "draw.py"
    drawn_before = [p.stat().st_mtime_ns for p in sorted(script.parent.glob("figures/*"))]
    options = ["--results", str(tmp_path / "results"), "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(script), *options], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    figures = product(("fig2", "fig4", "fig5", "front"), (".png", ".svg"))
    assert {p.name for p in (tmp_path / "figures").iterdir()} == {*map("".join, figures)}
    drawn = (tmp_path / "figures" / "fig2.svg").read_text()
    assert "fed-sgd (n = 3)" in drawn
    assert drawn.count("not run yet") == 5
    assert "mime (n = 1, below the axis)" in drawn
    assert "mime-lamb (n = 1, ends below the axis)" in drawn
    assert drawn.count("not run: fed-lamb, fed-ams, adp-fed") == 1
    table = (tmp_path / "tables.md").read_text()
    left = "(**not final**: 9 or more tuning runs left)"
    assert f"| fed-sgd | lr = 0.5 (edge of the grid: lr) {left} |" in table
    assert "96.90 ± 0.10 % | 96.90 ± 0.10 % | 1 | 1 | 3 | 6 |" in table
    assert "\nNot shown, since it has run for fewer rounds: fed-ams.\n" in table
    assert "[log](results/fig2-mnist-mlp-1.jsonl)" in table
    run = "`fedlamb reproduce fig2 --panel mnist-mlp-1 -m fed-sgd,mime-lamb,mime --tune`"
    assert f"Chosen by best test accuracy. [log](results/fig2-mnist-mlp-1.jsonl),\n{run}" in table
    # What was run with rates that were given has not been tuned.
    assert (
        "(half of the training set, rates of cifar10-resnet18, only 2 of 100 rounds yet)" in table
    )
    assert "\nNot tuned: rates of fig4/cifar10-resnet18. [log]" in table
    assert "| fed-sgd | lr = 0.05 | 20.00 %" in table
    assert "\nNot tuned: rates of fig3/mnist-cnn-1. [log]" in table
    assert (
        "`fedlamb reproduce fig5 --panel mnist-cnn-lazy -m fed-lamb --seeds 1 --rounds 4`" in table
    )
    assert "lr = 0.01, weight_decay = 0.0 | 50.00 % | 50.00 % | – | – | 1 | – |" in table
    now = [p.stat().st_mtime_ns for p in sorted(script.parent.glob("figures/*"))]
    assert now == drawn_before  # elsewhere, nothing is touched


def test_ctrl_c_and_a_folder_in_use_are_told(
    small: Panel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedlamb.cli import reproduce as command
    from fedlamb.files import exclusive

    def stopped(*given: Any) -> None:
        raise KeyboardInterrupt

    options = ["reproduce", "fig2", "--device", "cpu", "--results", str(tmp_path)]
    with monkeypatch.context() as patched:
        patched.setattr(command, "run_groups", stopped)
        done = CliRunner().invoke(app, options)
    assert done.exit_code == 130
    assert "the same command goes on from there" in done.output
    with exclusive(tmp_path / ".fig2-digits.jsonl.lock", wait=False):
        busy = CliRunner().invoke(app, options)
    assert isinstance(busy.exception, SettingError)
    assert "in use by another process" in str(busy.exception)


@pytest.mark.parametrize(
    ("device", "model"), [("cpu", "mlp"), ("cuda", "mlp"), ("cuda", "resnet18")]
)
def test_on_a_gpu_large_models_alone_run_side_by_side(
    device: str, model: str, small: Panel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedlamb.cli import reproduce as command

    benches = []

    def run(wanted: Any, groups: Any, place: Any, engine: Any, bench: Any, *told: Any) -> None:
        benches.append(type(bench))
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_groups", run)
    monkeypatch.setattr(command, "device_of", lambda engine: torch.device(device))
    monkeypatch.setitem(small.settings["model"], "name", model)
    for workers in ("1", "2"):
        options = ["reproduce", "fig2", "--results", str(tmp_path), "--workers", workers]
        CliRunner().invoke(app, options)
    apart = device == "cpu" or model == "resnet18"
    assert benches == [Bench, Workers if apart else Bench]


def test_methods_that_a_figure_has_not_are_refused(tmp_path: Path) -> None:
    options = ["reproduce", "fig5", "--panel", "mnist-cnn-lazy", "--results", str(tmp_path / "new")]
    done = CliRunner().invoke(app, [*options, "-m", "fed-sgd,mime"])
    assert isinstance(done.exception, SettingError)
    assert "--methods = 'fed-sgd,mime': names none" in str(done.exception)
    assert "choose from fed-lamb, mime-lamb" in str(done.exception)
    assert not (tmp_path / "new").exists()


def test_trials_of_several_methods_run_side_by_side(
    small: Panel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(self: Workers, jobs: Any, told: Any) -> Any:
        assert [job.method for job in jobs] == ["fed-sgd", "fed-sgd", "fed-ams"]
        for number in (2, 1, 0):
            jobs[number].partial.mkdir(parents=True, exist_ok=True)
            numbers = ("test_accuracy", "train_loss", "uplink_bytes", "downlink_bytes", "seconds")
            yield number, [dict.fromkeys(numbers, number)]

    monkeypatch.setattr(Workers, "run", run)
    wanted, results = Wanted(small, small.curves, 10, 1, "test", True), Results(tmp_path)
    groups = [
        Group("fed-sgd", "", 10, [({"lr": 0.01}, 0), ({"lr": 0.03}, 0)], "grid"),
        Group("fed-ams", "", 10, [({"lr": 0.001}, 0)], "grid"),
    ]
    run_groups(wanted, groups, results, ENGINE, Workers(2), nobody, nobody)
    lines = results.lines(small)
    assert [(x.get("method"), x["session"]) for x in lines] == [
        (None, 1), ("fed-ams", 1), (None, 2), ("fed-sgd", 2), ("fed-sgd", 2)
    ]  # fmt: skip
    assert [x["test_accuracy"] for x in lines if "method" in x] == [[2], [0], [1]]
    assert not [*(tmp_path / "partial").iterdir()]


def test_lines_of_trials_side_by_side_come_in_the_groups_order(
    small: Panel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(self: Workers, jobs: Any, told: Any) -> Any:
        for number in order:
            if number is None:
                raise KeyboardInterrupt
            job = jobs[number]
            job.partial.mkdir(parents=True, exist_ok=True)
            numbers = ("test_accuracy", "train_loss", "uplink_bytes", "downlink_bytes", "seconds")
            yield number, [dict.fromkeys(numbers, job.values["lr"])]

    monkeypatch.setattr(Workers, "run", run)
    wanted, results = Wanted(small, small.curves[:1], 10, 1, "test", True), Results(tmp_path)
    rates = small.curves[0].grid()["lr"][:4]
    group = Group("fed-sgd", "", 10, [({"lr": lr}, 0) for lr in rates], "whole")

    def written() -> list[float]:
        return [x["values"]["lr"] for x in results.lines(small) if "method" in x]

    def carry_out() -> None:
        run_groups(
            wanted, [group], results, ENGINE, Workers(2), lambda *now: None, lambda *now: None
        )

    order: list[int | None] = [1, 0, 3, None]
    with pytest.raises(KeyboardInterrupt):
        carry_out()
    assert written() == list(rates[:2])
    assert len(list((tmp_path / "partial").iterdir())) == 1  # the fourth: done, and not yet written
    group = group._replace(points=group.points[2:])
    order = [1, 0]
    carry_out()
    assert written() == list(rates)
    assert list((tmp_path / "partial").iterdir()) == []
