"""The result table, as rows of text."""

from collections.abc import Sequence
from statistics import mean, stdev

from ..records import Summary


def headings(target: float) -> tuple[str, ...]:
    """The heads of the columns; `best` names its round."""
    return ("method", "best (round)", "final", f"to {percent(target)}", "up MB", "down MB", "s")


def rows(summaries: Sequence[Summary]) -> list[tuple[str, ...]]:
    """One row of cells for each summary, in the order of `headings`."""
    return [
        (
            s.method,
            f"{percent(s.best_accuracy)} ({s.best_round})" if s.best_round else "–",
            "diverged" if s.status == "diverged" else percent(s.final_accuracy),
            "never" if s.rounds_to_target is None else f"round {s.rounds_to_target}",
            f"{s.uplink_bytes / 1e6:.2f}",
            f"{s.downlink_bytes / 1e6:.2f}",
            f"{s.seconds:.1f}",
        )
        for s in summaries
    ]


def percent(share: float | None) -> str:
    """0.9417 -> 94.2 %"""
    return "–" if share is None else f"{100 * share:.1f} %"


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean and sample standard deviation, in percent; a single value alone."""
    if len(values) == 1:
        return f"{100 * values[0]:.{digits}f} %"
    return f"{100 * mean(values):.{digits}f} ± {100 * stdev(values):.{digits}f} %"
