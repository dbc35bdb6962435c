"""What is said while a run is under way; what takes seconds, before it begins."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


def leads() -> bool:
    """Whether this process writes and speaks; the only one does."""
    return os.environ.get("RANK", "0") == "0"


def say(text: str) -> None:
    """To standard error, beside whatever is shown."""
    print(f"fedlamb: {text}", file=sys.stderr, flush=True)


@contextmanager
def compiling(what: str) -> Iterator[None]:
    """Says that this is being compiled, and how long it took."""
    if leads():
        say(f"compiling {what} …")
    begun = time.perf_counter()
    yield
    if leads():
        say(f"compiled {what} in {time.perf_counter() - begun:.1f} s")
