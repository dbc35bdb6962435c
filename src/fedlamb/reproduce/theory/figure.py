"""The pictures of `fedlamb theory`, drawn from the lines of theory.jsonl."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from ...errors import SettingError
from .counterexample import MEDIAN
from .experiments import EXPERIMENTS, Experiment
from .measured import Line, Measure
from .slopes import interval

_COLOURS = {"fed-lamb": "#D55E00", "fed-ams": "#E69F00"}
_CURVES = (("#D55E00", "o"), ("#0072B2", "s"), ("#009E73", "^"), ("#E69F00", "D"))
_MEASURES: dict[Measure, str] = {
    "plain": "mean of |∇f|²",
    "weighted": "mean of |∇f / v̂$^{1/4}$|²",
}


def require() -> None:
    """Raises where the drawing library is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise SettingError(
            "theory", "pictures", "need matplotlib: pip install matplotlib brings it"
        ) from None


def draw(lines: Sequence[Line], folder: Path) -> list[Path]:
    """Draws both pictures as PNG and SVG; the same lines give the same bytes."""
    require()
    import matplotlib
    from matplotlib.figure import Figure

    paths = []
    style: dict[Any, Any] = {
        "font.size": 8,
        "svg.hashsalt": "fedlamb",
        "svg.fonttype": "none",
        "axes.grid": True,
        "grid.alpha": 0.3,
    }
    with matplotlib.rc_context(style):
        for name, size, fill in (("slopes", (12, 5.6), _slopes), ("median", (10, 5.2), _median)):
            figure = Figure(figsize=size, layout="constrained")
            fill(figure, lines)
            for kind, facts in (("png", {}), ("svg", {"Date": None})):
                paths.append(folder / f"theory-{name}.{kind}")
                figure.savefig(paths[-1], dpi=110, metadata=facts)
    return paths


def _slopes(figure: Any, lines: Sequence[Line]) -> None:
    """A column for each letter, a row for each measure; dashed lines have the predicted slope."""
    axes = list(dict.fromkeys(e.axis for e in EXPERIMENTS))
    panels = figure.subplots(len(_MEASURES), len(axes), squeeze=False)
    for row, (measure, label) in zip(panels, _MEASURES.items(), strict=True):
        row[0].set_ylabel(label)
        for panel, axis in zip(row, axes, strict=True):
            panel.loglog()
            panel.set_xlabel(axis)
            group = [e for e in EXPERIMENTS if e.axis == axis]
            for experiment, (colour, marker) in zip(group, _CURVES, strict=False):
                _curve(panel, experiment, measure, lines, colour, marker)
            low, high = panel.get_ylim()
            if high < 10 * low:  # no drama where nothing happens
                panel.set_ylim(low / 3, high * 3)
    for panel in panels[0]:
        panel.legend(fontsize=6, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)


def _curve(
    panel: Any,
    experiment: Experiment,
    measure: Measure,
    lines: Sequence[Line],
    colour: str,
    marker: str,
) -> None:
    """The mean over seeds with its 95 % interval, and the predicted slope from its start."""
    at: dict[int, list[float]] = {}
    for line in lines:
        if line["experiment"] == experiment.name:
            at.setdefault(line["settings"][experiment.axis], []).append(line[measure])
    if not at:
        return
    found = [interval(values) for values in at.values()]
    means = [one.mean for one in found]
    low, high = [m.mean - m.half for m in found], [m.mean + m.half for m in found]
    panel.fill_between(list(at), low, high, color=colour, alpha=0.2, linewidth=0)
    panel.plot(
        list(at),
        means,
        color=colour,
        marker=marker,
        markersize=3,
        linewidth=1.2,
        label=experiment.title,
    )
    exponent = experiment.corollary if measure == "plain" else experiment.theorem
    ends = [min(at), max(at)]
    if exponent <= 1:  # T^2 would flatten everything else
        bound = [means[0] * (x / ends[0]) ** exponent for x in ends]
        panel.plot(ends, bound, color=colour, linewidth=0.8, linestyle="--")


def _median(figure: Any, lines: Sequence[Line]) -> None:
    """x and the gradient over rounds for both sets of centres, and both sides of Theorem 1."""
    grid = figure.add_gridspec(len(MEDIAN), 3)
    for row, (name, (centres, _)) in enumerate(MEDIAN.items()):
        where, slope = figure.add_subplot(grid[row, 0]), figure.add_subplot(grid[row, 1])
        middle, average = sorted(centres)[1], mean(centres)
        where.axhline(average, color="#555555", linewidth=0.8, linestyle="--")
        where.axhline(middle, color="#555555", linewidth=0.8, linestyle=":")
        where.annotate(f"mean {average:g}", (1, average), va="bottom", fontsize=7)
        where.annotate(f"median {middle:g}", (1, middle), va="bottom", fontsize=7)
        for line in lines:
            if line["experiment"] != name:
                continue
            method = line["settings"]["method"]
            rounds = _thinned(len(line["x"]))
            x = [line["x"][r] for r in rounds]
            look = {"color": _COLOURS[method], "linewidth": 1.2, "label": method}
            where.plot([r + 1 for r in rounds], x, **look)
            slope.plot([r + 1 for r in rounds], [abs(v - average) for v in x], **look)
        where.set_title(f"centres {', '.join(f'{c:g}' for c in centres)}", fontsize=8)
        where.set_ylabel("x")
        slope.set_ylabel("|gradient of the mean loss|")
        slope.set_title("0 at a stationary point", fontsize=8)
        for panel in (where, slope):
            panel.set_xscale("log")
            panel.set_xlabel("rounds done + 1")
            panel.legend(fontsize=7)
    both = [line for line in lines if line["experiment"] == "theorem-1"]
    panel = figure.add_subplot(grid[:, 2])
    rounds = [line["settings"]["rounds"] for line in both]
    left, right = [line["weighted"] for line in both], [line["right"] for line in both]
    panel.loglog(rounds, left, color=_COLOURS["fed-lamb"], marker="o", label="left side, measured")
    panel.loglog(rounds, right, color="#555555", marker="s", linestyle="--", label="right side")
    panel.set_title("Theorem 1, centres 10, 10, 13, φ = 1, v̂₀ = 1", fontsize=8)
    panel.set_xlabel("R")
    panel.legend(fontsize=7)


def _thinned(length: int) -> list[int]:
    """All of the first rounds, then fewer and fewer: a curve over log rounds shows no more."""
    found, at = [], 0
    while at < length:
        found.append(at)
        at += max(1, at // 100)
    return found
