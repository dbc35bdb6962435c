"""The run folder: it stands alone, and every figure can be redrawn from it.

    settings.json            everything that decides the result, defaults written out
    environment.json         versions and machine
    metrics.jsonl            one line per finished round
    checkpoint.safetensors   what the next round depends on, and in
    clients/ROUND.safetensors   the states of the clients that took part in that round last
    summary.json             best and final accuracy, rounds to target, traffic, time

A round's line is written before its checkpoint, so a crash in between is seen as one line too
many, which a resumed run removes: at most the round in flight is lost.
"""

import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch

from .errors import SettingError
from .files import append_lines, exclusive, write_text
from .simulate.fit import Round, Run
from .simulate.saved import Journal

Status = Literal["finished", "interrupted", "diverged"]


@dataclass(frozen=True)
class Summary:
    """One run in a row of a table."""

    method: str
    status: Status
    rounds: int
    best_accuracy: float | None
    best_round: int | None
    final_accuracy: float | None
    target: float
    rounds_to_target: int | None
    uplink_bytes: int
    downlink_bytes: int
    seconds: float


class RunFolder:
    """One method's run on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.journal = Journal(path)
        self._metrics = path / "metrics.jsonl"

    def create(self, settings: dict[str, Any]) -> None:
        """Makes the folder and writes what is known before the first round."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.path / "settings.json", settings)
        write_json(self.path / "environment.json", environment())
        self._metrics.touch()

    def append(self, *rounds: Round) -> None:
        """Writes the lines of finished rounds."""
        lines = [
            {
                "round": done.number,
                **{name: v if math.isfinite(v) else None for name, v in done.metrics.items()},
                "uplink_bytes": done.uplink_bytes,
                "downlink_bytes": done.downlink_bytes,
                "seconds": round(done.seconds, 6),
                "clients": done.clients,
            }
            for done in rounds
        ]
        append_lines(self._metrics, *lines)

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of all finished rounds."""
        return read_metrics(self.path)

    def keep_rounds(self, number: int) -> None:
        """Drops lines past round `number`, and a line that a crash cut short."""
        kept = self.metrics()[:number]
        if len(kept) < number:
            raise too_few(self.path, len(kept), number)
        write_text(self._metrics, "".join(json.dumps(line) + "\n" for line in kept))

    def summarise(self, method: str, status: Status, target: float) -> Summary:
        """Writes and returns the summary, made from the metrics alone."""
        summary = summary_of(method, status, target, self.metrics())
        write_json(self.path / "summary.json", asdict(summary))
        return summary


class Pace:
    """When to save, so that no more than this share of the time goes into it; 1: always."""

    def __init__(self, share: float) -> None:
        self._share, self._saved, self._took = share, time.perf_counter(), 0.0

    def due(self) -> bool:
        """Whether the last time to save is long enough ago."""
        since = time.perf_counter() - self._saved
        return self._share == 1 or self._took <= self._share * since

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around the saving itself."""
        begun = time.perf_counter()
        yield
        self._saved = time.perf_counter()
        self._took = self._saved - begun


def conduct(
    run: Run,
    folder: RunFolder,
    on_round: Callable[[Round], None],
    stop: Callable[[], bool],
    saving: float = 1.0,
) -> Status:
    """Runs the remaining rounds, each saved before the next; `stop` ends after a round.

    saving: the share of time that may go into saving; below 1, some rounds are not saved by
        themselves, and a kill loses those.
    The caller holds the folder's lock. All processes of a crew call this, the first one writes.
    """
    crew, leads = run.crew, run.crew.leads
    pace = Pace(saving)
    if folder.journal.exists():
        folder.journal.read(run)
    elif leads and saving == 1 and len(folder.metrics()) > 1:
        right = "has rounds in metrics.jsonl and no checkpoint.safetensors to go on from"
        raise SettingError("run folder", str(folder.path), f"{right}; begin a new run")
    if leads:
        folder.keep_rounds(run.number)
    noted = run.number
    try:
        while run.number < run.rounds and not run.diverged:
            if crew.agreed(stop(), run.task.device):
                return "interrupted"
            done = next(run)
            if leads:
                folder.append(done)
            folder.journal.note(run)
            noted = run.number
            if saving == 1 or crew.agreed(pace.due(), run.task.device):
                with pace.saving():
                    folder.journal.write(run)
            on_round(done)
    except KeyboardInterrupt:
        if saving < 1 and noted == run.number > 0:
            folder.journal.write(run)
        raise
    return "diverged" if run.diverged else "finished"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a run's metrics; a last line that a crash cut short is left out."""
    lines = []
    for line in (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines


def too_few(path: Path, lines: int, rounds: int) -> SettingError:
    """The error for metrics that do not hold all rounds that were finished."""
    right = (
        f"has {lines} readable lines in metrics.jsonl for {rounds} finished rounds; put the file "
        "back as it was, or begin a new run"
    )
    return SettingError("run folder", str(path), right)


def summary_of(method: str, status: Status, target: float, lines: list[dict[str, Any]]) -> Summary:
    """The summary of these metrics; the earliest round counts where several are best."""
    accuracies = {line["round"]: line["test_accuracy"] for line in lines}
    best = max(accuracies, key=lambda r: accuracies[r], default=None)
    return Summary(
        method=method,
        status=status,
        rounds=len(lines),
        best_accuracy=accuracies.get(best) if best else None,
        best_round=best,
        final_accuracy=lines[-1]["test_accuracy"] if lines else None,
        target=target,
        rounds_to_target=next((r for r, a in accuracies.items() if a >= target), None),
        uplink_bytes=sum(line["uplink_bytes"] for line in lines),
        downlink_bytes=sum(line["downlink_bytes"] for line in lines),
        seconds=round(sum(line["seconds"] for line in lines), 3),
    )


def environment() -> dict[str, Any]:
    """Versions and machine, for the record."""
    from . import __version__  # of these sources, installed or not

    others = {name: version(name) for name in ("torch", "numpy", "safetensors", "pydantic")}
    return {
        "python": platform.python_version(),
        "packages": {"fedlamb": __version__, **others},
        "system": platform.system(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def write_json(path: Path, value: Any) -> None:
    """Writes JSON; the file is whole or absent."""
    write_text(path, json.dumps(value, indent=1) + "\n")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time in a run folder, or at a file of results."""
    lock = path / ".lock" if path.is_dir() else path.with_name(f".{path.name}.lock")
    with ExitStack() as held:
        try:
            held.enter_context(exclusive(lock, wait=False))
        except OSError as error:
            raise SettingError(
                "run folder" if path.is_dir() else "results",
                str(path),
                "is in use by another process; wait until it has ended",
            ) from error
        yield
