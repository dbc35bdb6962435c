"""`report.html` of a sweep: accuracy along its grid, the best curves, and the ranking."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from .page import html_table, require, write_html
from .table import spread

Trial = Mapping[str, Any]
_DRAWN = 6  # curves beside each other; more cannot be told apart
_COLOURS = ("#D55E00", "#0072B2", "#E69F00", "#56B4E9", "#CC79A7", "#555555")


class Ranked(NamedTuple):
    """One point of the grid."""

    values: dict[str, Any]
    trials: list[Trial]
    """One for each seed."""

    @property
    def best(self) -> list[float]:
        """The best accuracy under each seed."""
        return [trial["best_accuracy"] or 0.0 for trial in self.trials]

    @property
    def lost(self) -> float:
        """How far its last accuracy lies below its best, in the mean over seeds."""
        return mean(self.best) - mean(trial["final_accuracy"] or 0.0 for trial in self.trials)

    def cells(self) -> tuple[str, ...]:
        """Of a table, in the order of `headings`."""
        final = spread([trial["final_accuracy"] or 0.0 for trial in self.trials], 1)
        diverged = any(trial["status"] == "diverged" for trial in self.trials)
        ends = "diverged" if diverged else final
        return *map(str, self.values.values()), spread(self.best, 1), ends, str(len(self.trials))


def headings(grid: Mapping[str, Any]) -> tuple[str, ...]:
    """The heads of the ranking's columns."""
    return *grid, "best", "final", "seeds"


def ranked(trials: Sequence[Trial]) -> list[Ranked]:
    """The points, the best mean over seeds first; of equal ones, the first of the grid."""
    points: dict[str, list[Trial]] = {}
    for trial in trials:
        points.setdefault(json.dumps(trial["values"]), []).append(trial)
    found = [Ranked(dict(some[0]["values"]), some) for some in points.values()]
    return sorted(found, key=lambda point: -mean(point.best))


def write_sweep_page(path: Path, facts: Mapping[str, Any], trials: Sequence[Trial]) -> None:
    """Writes the page for these trials; `facts` are those of `sweep.json`."""
    require()
    grid, settings, points = facts["grid"], facts["settings"], ranked(trials)
    said = (
        f"{facts['method']} on {settings['data']['name']}, {len(points)} points of the grid, "
        f"{settings['federation']['rounds']} rounds, n = {facts['seeds']} for each point"
    )
    said += "; mean ± sample standard deviation over seeds" if facts["seeds"] > 1 else ""
    write_html(
        path,
        title=f"Sweep: {settings.get('title') or facts['method']}",
        facts=said,
        table=html_table(headings(grid), [point.cells() for point in points]),
        figures=[_along_the_grid(grid, points), _best_curves(points)],
        settings=facts,
    )


def _along_the_grid(grid: Mapping[str, Sequence[Any]], points: Sequence[Ranked]) -> Any:
    """Best accuracy by the grid's first axis, a line for each combination of the others."""
    from plotly.graph_objects import Figure, Scatter

    first, *others = grid
    figure = Figure()
    lines: dict[str, list[Ranked]] = {}
    for point in points:
        name = ", ".join(f"{key} = {point.values[key]}" for key in others)
        lines.setdefault(name, []).append(point)
    for number, (name, some) in enumerate(sorted(lines.items())):
        some = sorted(some, key=lambda point: grid[first].index(point.values[first]))
        middles = [mean(point.best) for point in some]
        figure.add_trace(
            Scatter(
                x=[point.values[first] for point in some],
                y=middles,
                error_y={
                    "array": [max(p.best) - m for p, m in zip(some, middles, strict=True)],
                    "arrayminus": [m - min(p.best) for p, m in zip(some, middles, strict=True)],
                },
                name=name,
                mode="lines+markers",
                line={"color": _COLOURS[number % len(_COLOURS)]},
            )
        )
    numbers = [v for v in grid[first] if isinstance(v, int | float) and v > 0]
    wide = len(numbers) == len(grid[first]) and max(numbers) >= 10 * min(numbers)
    figure.update_xaxes(type="log" if wide else None, tickvals=numbers or None)
    bars = ", bars from the lowest to the highest seed" if len(points[0].trials) > 1 else ""
    return _laid_out(figure, f"Best test accuracy by {first}{bars}", first, len(lines) > 1)


def _best_curves(points: Sequence[Ranked]) -> Any:
    """Test accuracy by round of the best points, mean over seeds."""
    from plotly.graph_objects import Figure, Scatter

    figure = Figure()
    for colour, point in zip(_COLOURS, points[:_DRAWN], strict=False):
        curves = [trial["test_accuracy"] for trial in point.trials]
        rounds = min(len(curve) for curve in curves)  # diverged ones end early
        figure.add_trace(
            Scatter(
                x=list(range(1, rounds + 1)),
                y=[mean(curve[r] or 0.0 for curve in curves) for r in range(rounds)],
                name=", ".join(f"{key} = {value}" for key, value in point.values.items()),
                mode="lines",
                line={"color": colour, "width": 2},
            )
        )
    shown = min(len(points), _DRAWN)
    return _laid_out(figure, f"Test accuracy by round, the best {shown} points", "round", True)


def _laid_out(figure: Any, title: str, below: str, legend: bool) -> Any:
    figure.update_yaxes(tickformat=".0%")
    figure.update_layout(
        title=title,
        xaxis_title=below,
        template="plotly_white",
        height=440,
        showlegend=legend,
        margin={"l": 60, "r": 20, "t": 50, "b": 50},
    )
    return figure
