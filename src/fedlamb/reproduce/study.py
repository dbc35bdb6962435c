"""A panel's trials: which there are, which are left, and what tuning chooses.

Tuning is successive halving in three stages. First, every point of the paper's grid under one seed
for a fifth of the rounds. Then, under the same seed for all rounds: the points within half a
percentage point of the best (six at most), the best point of each of the three best rates, and that
of the rate below the best one, since lower rates are slower at first and may end higher; then, for
as long as there are any, the next rates to either side of the best of these, unless they were 20
percentage points behind in the first stage. Last, the three best of all these under the other
seeds. The point with the best mean is chosen. A narrow panel (ResNet-18) has part of the grid and a
tenth of the rounds for its first stage; the best point goes on, and the second best if it lies
within three percentage points, and then the better of the two under the other seeds.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import product
from typing import Any, Literal, NamedTuple

from ..errors import SettingError
from .panels import PANELS, Curve, Panel
from .results import Line, Results, choose, final_lines, key_of, of_curve, score

Select = Literal["test", "validation"]
SHARE = 1 / 12  # of the training rows, held out for validation: 5,000 of 60,000
_NEAR, _MOST, _RATES, _FAR = 0.005, 6, 3, 0.2
_SEEDED = 3  # points that are run under all seeds
_NARROW_NEAR, _NARROW_MOST, _NARROW_SEEDED = 0.03, 2, 1


class Wanted(NamedTuple):
    """What of a panel is to be run."""

    panel: Panel
    curves: tuple[Curve, ...]
    rounds: int
    seeds: int
    select: Select
    tune: bool
    """Whether to search also where tuned rates come along."""


class Group(NamedTuple):
    """Trials of one method that can run together."""

    method: str
    label: str
    """Of the curve."""
    rounds: int
    points: list[tuple[dict[str, Any], int]]
    """(values, seed)"""
    stage: str


def horizon(rounds: int, narrow: bool = False) -> int:
    """The rounds of tuning's first stage."""
    return max(2, rounds // (10 if narrow else 5))


def survivors(lines: Sequence[Line], select: str, narrow: bool = False) -> list[dict[str, Any]]:
    """The points that go on to the second stage, the best first."""
    ranked = sorted(lines, key=lambda line: -score(line, select))
    best = ranked[0]
    if narrow:
        least = score(best, select) - _NARROW_NEAR
        return [x["values"] for x in ranked[:_NARROW_MOST] if score(x, select) >= least]
    of_rate: dict[float, Line] = {}
    for line in ranked:
        of_rate.setdefault(line["values"]["lr"], line)  # the best one comes first
    lower = [rate for rate in of_rate if rate < best["values"]["lr"]]
    near = [line for line in ranked if score(line, select) >= score(best, select) - _NEAR]
    kept = near[:_MOST] + list(of_rate.values())[:_RATES]
    kept += [of_rate[max(lower)]] if lower else []
    return [line["values"] for line in ranked if line in kept]


def beside_the_best(
    first: Sequence[Line], whole: Sequence[Line], select: str
) -> list[dict[str, Any]]:
    """The points of the first stage whose rate, or server's rate, is next to that of the best whole
    run, as far as none with these rates has been run whole, and they were not far behind."""
    best = max(whole, key=lambda line: score(line, select))["values"]
    least = max(score(line, select) for line in first) - _FAR
    rates = [name for name in ("lr", "server_lr") if name in best]
    tried = [[line["values"][name] for name in rates] for line in whole]
    found = []
    for name in rates:
        steps = sorted({line["values"][name] for line in first})
        at = steps.index(best[name])
        for rate in steps[max(0, at - 1) : at] + steps[at + 1 : at + 2]:
            point = [{**best, name: rate}[n] for n in rates]
            there = [line for line in first if [line["values"][n] for n in rates] == point]
            nearest = max(there, key=lambda line: score(line, select), default=None)
            if nearest and point not in tried and score(nearest, select) >= least:
                found.append(nearest["values"])
    return found


def searches(wanted: Wanted, curve: Curve, results: Results) -> bool:
    """Whether a curve's rates are searched for: where asked, and where none come along."""
    if wanted.panel.tuned_as:
        return False
    return wanted.tune or tuned_values(wanted, curve, results) is None


def next_groups(wanted: Wanted, results: Results) -> list[Group]:
    """What can be run now and is not done; more may follow from it."""
    done = results.trials(wanted.panel)
    found = []
    for curve in wanted.curves:
        stages = _stages(wanted, curve, results, done)
        for stage, rounds, points in stages:
            left = [
                (values, seed)
                for values, seed in points
                if trial_key(curve.method, values, seed, rounds, wanted.select) not in done
            ]
            # One after another, runs share programs where they differ in their rates alone.
            left.sort(key=lambda point: _beside_rates(point[0]))
            if left:
                found.append(Group(curve.method, curve.label, rounds, left, stage))
                break  # what comes after depends on it
    return found


def _beside_rates(values: Mapping[str, Any]) -> str:
    return json.dumps({k: v for k, v in values.items() if k not in ("lr", "server_lr")})


def _stages(
    wanted: Wanted, curve: Curve, results: Results, done: Mapping[str, Line]
) -> Iterator[tuple[str, int, list[tuple[dict[str, Any], int]]]]:
    seeds = range(wanted.seeds)
    if not searches(wanted, curve, results):
        known = tuned_values(wanted, curve, results)
        if known is None:
            source = str(wanted.panel.tuned_as).replace("/", " --panel ")
            right = (
                f"takes the rates of another panel: fedlamb reproduce {source} --tune finds them"
            )
            raise SettingError("panel", wanted.panel.id, right)
        yield "final", wanted.rounds, [(known, seed) for seed in seeds]
        return
    narrow = wanted.panel.narrow
    grid, short = curve.grid(narrow), horizon(wanted.rounds, narrow)
    points = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    first: list[Line] = []
    if short < wanted.rounds and len(points) > 1:
        yield "grid", short, [(values, 0) for values in points]
        keys = {trial_key(curve.method, values, 0, short, wanted.select) for values in points}
        first = [line for key, line in done.items() if key in keys]
        points = survivors(first, wanted.select, narrow)
    seeded = _NARROW_SEEDED if narrow else _SEEDED
    if len(points) > seeded or (first and not narrow):
        ranked: list[Line] = []
        while points:
            yield "whole", wanted.rounds, [(values, 0) for values in points]
            keys = {trial_key(curve.method, v, 0, wanted.rounds, wanted.select) for v in points}
            ranked += [line for key, line in done.items() if key in keys]
            ranked.sort(key=lambda line: -score(line, wanted.select))
            climbs = first and not narrow
            points = beside_the_best(first, ranked, wanted.select) if climbs else []
        points = [line["values"] for line in ranked[:seeded]]
    yield "final", wanted.rounds, [(values, seed) for values in points for seed in seeds]


def expected_after_grid(wanted: Wanted) -> list[tuple[str, int, int]]:
    """(stage, trials, rounds) of what follows a grid, if five points go on, of a narrow one two."""
    if wanted.panel.narrow:
        return [("whole", 2, wanted.rounds), ("final", wanted.seeds - 1, wanted.rounds)]
    more_seeds = _SEEDED * (wanted.seeds - 1)
    return [("whole", 5, wanted.rounds), ("final", more_seeds, wanted.rounds)]


def trial_key(method: str, values: dict[str, Any], seed: int, rounds: int, select: str) -> str:
    """Tells the trial apart from all others of its panel."""
    trial = {"method": method, "values": values, "seed": seed}
    return key_of({**trial, "rounds": rounds, "select": select})


def tuned_values(wanted: Wanted, curve: Curve, results: Results) -> dict[str, Any] | None:
    """The rates that tuning chose for a curve: in these results, or as the package has them; where
    there are none, those of the panel that it may take them from."""
    own = wanted.panel
    sources = [] if own.tuned_as else [(own, curve)]
    lenders = [panel for panel in PANELS if panel.id in (own.tuned_as, own.rates_from)]
    sources += [(p, c) for p in lenders for c in p.curves if c.method == curve.method]
    for panel, source in sources:
        found = chosen_values(panel, source, wanted.select, wanted.seeds, results)
        if found is None:
            text = files(__package__).joinpath("tuned.json").read_text(encoding="utf-8")
            found = json.loads(text).get(panel.id, {}).get(wanted.select, {}).get(source.label)
        if found is not None:
            return {**found, **curve.fixed}
    return None


def chosen_values(
    panel: Panel, curve: Curve, select: Select, seeds: int, results: Results
) -> dict[str, Any] | None:
    """What a complete tuning with so many seeds chose; None where it is not complete."""
    wanted = Wanted(panel, (curve,), panel.rounds, seeds, select, tune=True)
    lines = of_curve(results.trials(panel), curve, select)
    choice = choose(lines, panel.rounds, select)
    return None if choice is None or next_groups(wanted, results) else choice.values


def tuned_table(results: Results, seeds: int) -> dict[str, Any]:
    """What `tuned.json` holds, from results: panel -> how it was chosen -> curve -> values. The
    best known, with so many seeds, of a narrow panel with one; some of the tuning may be left to
    run."""
    table: dict[str, Any] = {}
    selects: tuple[Select, ...] = ("test", "validation")
    for panel, select in product(PANELS, selects):
        for curve in () if panel.tuned_as else panel.curves:
            lines = of_curve(results.trials(panel), curve, select)
            choice = choose(lines, panel.rounds, select)
            least = 1 if panel.narrow else seeds
            if choice and len(final_lines(lines, choice.values, panel.rounds, seeds)) >= least:
                table.setdefault(panel.id, {}).setdefault(select, {})[curve.label] = choice.values
    return table
