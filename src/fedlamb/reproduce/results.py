"""Results on disk: a file of JSON lines for each panel, one line per finished trial."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from ..files import append_lines, whole_lines
from ..records import environment
from .panels import Curve, Panel

Line = dict[str, Any]
DIGITS = 6  # of an accuracy, on disk


class Choice(NamedTuple):
    """The point of a grid that was chosen for a curve."""

    values: dict[str, Any]
    tried: int
    """Points of the grid."""
    runs: int
    """Trials that tuning took, all stages together."""


class Results:
    """Trials are told apart by method, values, seed, rounds, and how the rates are chosen.

    A session's line stands before the trials that it ran: settings, environment, revision.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, panel: Panel) -> Path:
        """The panel's file."""
        return self.folder / f"{panel.figure}-{panel.name}.jsonl"

    def lines(self, panel: Panel) -> list[Line]:
        """All whole lines; one that a crash cut short is left out."""
        return whole_lines(self.path(panel))

    def trials(self, panel: Panel) -> dict[str, Line]:
        """The finished trials by their keys."""
        return {key_of(line): line for line in self.lines(panel) if "method" in line}

    def append(self, panel: Panel, line: Line) -> None:
        """Writes one line, whole, on the disk when this returns."""
        path = self.path(panel)
        path.parent.mkdir(parents=True, exist_ok=True)
        append_lines(path, line)

    def begin(self, panel: Panel, settings: Mapping[str, Any]) -> int:
        """A session: what its trials have in common."""
        number = sum("session" in line and "method" not in line for line in self.lines(panel)) + 1
        facts = {"session": number, "settings": dict(settings), "environment": environment()}
        self.append(panel, {**facts, "revision": revision()})
        return number


def key_of(line: Mapping[str, Any]) -> str:
    """Of a trial."""
    parts = [line["method"], line["values"], line["seed"], line["rounds"], line["select"]]
    return json.dumps(parts, sort_keys=True)


def score(line: Mapping[str, Any], select: str) -> float:
    """What decides between points: best on the test set as in the paper, or last on validation."""
    if select == "test":
        return max((a for a in line["test_accuracy"] if a is not None), default=0.0)
    last: float | None = (line["validation_accuracy"] or [0.0])[-1]
    return last or 0.0


def of_curve(lines: Mapping[str, Line], curve: Curve, select: str) -> list[Line]:
    """The trials of one curve: its method, with its fixed values."""
    return [
        line
        for line in lines.values()
        if line["method"] == curve.method
        and line["select"] == select
        and curve.fixed.items() <= line["values"].items()
    ]


def choose(lines: list[Line], rounds: int, select: str) -> Choice | None:
    """Of the points with most seeds over all rounds, the one with the best mean score."""
    whole: dict[str, list[Line]] = {}
    for line in lines:
        if line["rounds"] == rounds:
            whole.setdefault(json.dumps(line["values"], sort_keys=True), []).append(line)
    if not whole:
        return None
    most = max(len(group) for group in whole.values())
    full = {v: group for v, group in whole.items() if len(group) == most}
    best = max(full, key=lambda v: mean(score(line, select) for line in full[v]))
    points = {json.dumps(line["values"], sort_keys=True) for line in lines}
    return Choice(json.loads(best), len(points), len(lines))


def final_lines(
    lines: Sequence[Line], values: Mapping[str, Any] | None, rounds: int, seeds: int
) -> list[Line]:
    """The whole runs at one point, one for each seed."""
    own = [x for x in lines if x["values"] == values and x["rounds"] == rounds]
    return sorted((x for x in own if x["seed"] < seeds), key=lambda x: x["seed"])


def accuracies(line: Line) -> list[float]:
    """Of the test set, round by round; those of a run that diverged end there."""
    return [a for a in line["test_accuracy"] if a is not None]


def first_round_at(lines: Sequence[Line], target: float) -> int | None:
    """The first round in which the mean over seeds is at least the target."""
    for number, now in enumerate(zip(*map(accuracies, lines), strict=False), 1):
        if mean(now) >= target:
            return number
    return None


def revision() -> str | None:
    """Of the sources, where they lie in a repository, and whether they were changed since;
    $FEDLAMB_REVISION tells it elsewhere."""
    told = os.environ.get("FEDLAMB_REVISION")
    if told:
        return told
    git = ["git", "-C", str(Path(__file__).parent.parent)]  # the package: results change, too
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        changed = subprocess.run(
            [*git, "status", "--porcelain", "."], capture_output=True, text=True
        )
    except OSError:
        return None
    if head.returncode != 0:
        return None
    return head.stdout.strip() + ("-changed" if changed.stdout.strip() else "")
