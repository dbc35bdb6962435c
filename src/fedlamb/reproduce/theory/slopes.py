"""Exponents fitted to what was measured, beside those that the paper allows."""

from collections.abc import Sequence
from math import log, sqrt
from statistics import linear_regression, mean, stdev
from typing import NamedTuple

from .experiments import EXPERIMENTS, Experiment
from .measured import Line, Measure


class Slope(NamedTuple):
    """A mean over seeds and half the width of its 95 % confidence interval."""

    mean: float
    half: float

    def __str__(self) -> str:
        return f"{self.mean:+.3f} ± {self.half:.3f}"


class Verdict(NamedTuple):
    """What the paper allows at most, and what was measured, as exponents of the letter varied."""

    experiment: Experiment
    measure: Measure
    predicted: float
    slope: Slope
    """Over all values, by least squares."""
    last: Slope
    """Between the two largest values."""

    @property
    def holds(self) -> bool:
        """Whether both slopes are at most as predicted; a right side may be loose, not low."""
        return max(s.mean + s.half for s in (self.slope, self.last)) <= self.predicted + TOLERANCE


TOLERANCE = 0.1  # a fit over a finite range is not the limit


def verdicts(lines: Sequence[Line]) -> list[Verdict]:
    """Two for each experiment that the lines hold."""
    found = []
    for experiment in EXPERIMENTS:
        by_seed = _by_seed(experiment, lines)
        if not by_seed:
            continue
        values = sorted(by_seed[0])
        predicted: dict[Measure, float] = {
            "plain": experiment.corollary,
            "weighted": experiment.theorem,
        }
        for which, exponent in predicted.items():
            all, last = (
                interval([slope(some, [of[v][which] for v in some]) for of in by_seed])
                for some in (values, values[-2:])
            )
            found.append(Verdict(experiment, which, exponent, all, last))
    return found


def _by_seed(experiment: Experiment, lines: Sequence[Line]) -> list[dict[int, Line]]:
    """For each seed, the line of each value."""
    found: dict[int, dict[int, Line]] = {}
    for line in lines:
        if line["experiment"] == experiment.name:
            found.setdefault(line["seed"], {})[line["settings"][experiment.axis]] = line
    return list(found.values())


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The least-squares slope of log y over log x."""
    return linear_regression([log(v) for v in x], [log(v) for v in y]).slope


def interval(values: Sequence[float]) -> Slope:
    """The mean and its 95 % confidence interval, by Student's t."""
    return Slope(mean(values), t95(len(values) - 1) * stdev(values) / sqrt(len(values)))


def t95(freedom: int) -> float:
    """The 97.5 % point of Student's t: tabled, then by its series, good to three digits."""
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    z = 1.959964
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / float(freedom) ** power for power, term in enumerate(terms, 1))


_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
