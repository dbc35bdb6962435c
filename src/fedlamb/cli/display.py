"""What a user sees while something runs, and how it is asked to stop."""

import signal
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
        bars.update(bars.task_ids[-1], completed=done)

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
    """Ctrl-C or a termination signal stops after the round; a second Ctrl-C stops at once."""
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        console.print("Stopping after this round (Ctrl-C again stops at once) …")

    before = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Shown:
    """A live display on a terminal; elsewhere a line for every tenth of a run."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._name, self._total = "", 1

    def begin(self, method: str, rounds: int, done: int) -> None:
        """A method's run starts, or goes on after `done` rounds."""
        self._name, self._total = method, rounds
        self._bars.add_task(method, total=rounds, completed=done, accuracy="", now="")

    def rounds(self, done: int, best: float | None) -> None:
        """So many rounds of trials are done."""
        self._bars.update(self._bars.task_ids[-1], completed=done, accuracy=percent(best), now="")
        if not console.is_terminal and done % max(1, self._total // 5) == 0:
            console.print(f"{self._name:16} round {done}/{self._total}  best {percent(best)}")

    def client(self, done: int, cohort: int) -> None:
        """Some clients of the round are done; after the last one the model is tested."""
        now = f"client {done}/{cohort}" if done < cohort else "testing"
        self._bars.update(self._bars.task_ids[-1], now=now)

    def round(self, done: Round) -> None:
        """A round is done."""
        accuracy = percent(done.metrics.get("test_accuracy"))
        self._bars.update(self._bars.task_ids[-1], completed=done.number, accuracy=accuracy, now="")
        if not console.is_terminal and done.number % max(1, self._total // 10) == 0:
            console.print(f"{self._name:10} round {done.number}/{self._total}  {accuracy}")


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
        disable=not console.is_terminal,
    )
    with bars:
        yield Shown(bars)
