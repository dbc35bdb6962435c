"""What a user sees while something runs, and how it is asked to stop."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..report.table import percent
from ..simulate.fit import Round
from ..simulate.saying import leads
from ..tasks.decoded import Report

console = Console(highlight=False, markup=False, quiet=not leads())


@contextmanager
def decoding(name: str) -> Iterator[Report]:
    """Shows how many images are decoded; nothing where they are decoded already."""
    bars = Progress(
        TextColumn(f"decoding {name}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )

    def report(done: int, total: int | None) -> None:
        if not bars.task_ids:
            bars.add_task("", total=total)
            if not console.is_terminal:
                console.print(f"Decoding {name} (once; kept for the next time) …")
        bars.update(bars.task_ids[-1], completed=done, total=total)

    with bars:
        yield report


@contextmanager
def stop_at_once() -> Iterator[None]:
    """A termination signal is taken as Ctrl-C."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def stop_after_round() -> Iterator[Callable[[], bool]]:
    """Ctrl-C stops after the round; a second one, or a termination signal, at once."""
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        console.print("Stopping after this round (Ctrl-C again stops at once) …")

    # Who sends a termination signal, such as a batch system, waits for seconds, not for a round.
    handlers = {signal.SIGINT: ask, signal.SIGTERM: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Shown:
    """A live display on a terminal; elsewhere a line now and then, and after long silence."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._name, self._total, self._done = "", 1, 0
        self._said = time.monotonic()

    def begin(self, name: str, rounds: int, done: int) -> None:
        """A run starts, or goes on after `done` rounds."""
        self._name, self._total, self._done = name, rounds, done
        self._said = time.monotonic()
        self._bars.add_task(name, total=rounds, completed=done, accuracy="", now="")

    def client(self, done: int, cohort: int) -> None:
        """Some clients of the round are done; after the last one the model is tested."""
        now = f"client {done}/{cohort}" if done < cohort else "testing"
        self._bars.update(self._bars.task_ids[-1], now=now)
        self._say(self._done + 1, now)

    def round(self, done: Round) -> None:
        """A round of a run is done."""
        self._now(done.number, percent(done.metrics.get("test_accuracy")), 10)

    def rounds(self, done: int, best: float | None) -> None:
        """So many rounds of trials are done."""
        self._now(done, f"best {percent(best)}", 5)

    def _now(self, done: int, accuracy: str, lines: int) -> None:
        self._done = done
        self._bars.update(self._bars.task_ids[-1], completed=done, accuracy=accuracy, now="")
        self._say(done, accuracy, due=done % max(1, self._total // lines) == 0)

    def _say(self, round: int, what: str, due: bool = False) -> None:
        if not console.is_terminal and (due or time.monotonic() - self._said > _SILENCE):
            self._said = time.monotonic()
            console.print(f"{self._name:10} round {round}/{self._total}  {what}")


_SILENCE = 20.0  # seconds


@contextmanager
def progress() -> Iterator[Shown]:
    """Shows the rounds of one method after another."""
    bars = Progress(
        TextColumn("{task.description:10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[accuracy]:>8}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[now]}"),
        console=console,
        disable=not (console.is_terminal and leads()),
    )
    with bars:
        yield Shown(bars)
