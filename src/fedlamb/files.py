"""Files that are whole or absent, whatever happens while they are written."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to; it takes the place of `path` at the end of the block."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield aside
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        aside.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        aside.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a text file as a whole."""
    with written_aside(path) as aside:
        aside.write_text(text, encoding="utf-8")


def append_lines(path: Path, *values: Mapping[str, Any]) -> None:
    """Writes a line of JSON for each, on the disk when this returns; after a line that a crash cut
    short, on lines of their own."""
    with path.open("a+b") as file:
        file.seek(max(0, file.tell() - 1))
        cut = file.read(1) not in (b"", b"\n")
        text = ("\n" if cut else "") + "".join(json.dumps(value) + "\n" for value in values)
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """What `append_lines` wrote; a line that a crash cut short is left out."""
    found = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            found.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return found


def remove_leftovers(path: Path) -> None:
    """Removes what a killed process left aside of `path`."""
    for aside in path.parent.glob(f".{path.name}.*"):
        aside.unlink(missing_ok=True)


@contextmanager
def exclusive(path: Path, wait: bool) -> Iterator[None]:
    """Holds the lock file at `path`; where another process has it, waits or raises OSError."""
    with path.open("w") as file:
        _lock(file, wait)
        yield


try:
    import fcntl
except ImportError:  # not on Windows, where a file that is open cannot be replaced anyway

    def _lock(file: IO[str], wait: bool) -> None: ...
else:

    def _lock(file: IO[str], wait: bool) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def make_new(folder: Path) -> Path:
    """Makes the folder; under a number of its own where another process was faster."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    place, number = folder, 1
    while True:
        try:
            place.mkdir()
            return place
        except FileExistsError:
            number += 1
            place = folder.with_name(f"{folder.name}-{number}")
