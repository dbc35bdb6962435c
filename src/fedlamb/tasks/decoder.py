"""Encoded images -> pixels, on all cores.

Decoding small images holds Python's lock nearly all of the time, so threads do not help. This file
is also the program of the worker processes: batches come in and pixels go out by pipes, as plain
bytes. It imports nothing of the package, so that a worker starts in a fraction of a second.
"""

import io
import json
import os
import struct
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Pixels = NDArray[np.uint8]
_WORTH_A_PROCESS = 500  # images


class DecodingError(Exception):
    """An image that cannot be decoded: its place in the batch, and why."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(row, reason)
        self.row, self.reason = row, reason


class Decoder:
    """Decodes batches on worker processes, which start with the first batch worth it."""

    def __init__(self) -> None:
        self._workers: list[subprocess.Popen[bytes]] = []
        self._pool = ThreadPoolExecutor(max_workers=os.cpu_count() or 1)

    def __enter__(self) -> "Decoder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown()
        for worker in self._workers:
            worker.kill()
            worker.communicate()

    def decode(self, images: Sequence[bytes]) -> list[Pixels]:
        """Each image as (height, width, channels): 1 channel for grey, otherwise 3."""
        count = os.cpu_count() or 1
        if len(images) < _WORTH_A_PROCESS or count == 1:
            return [decode_one(data, row) for row, data in enumerate(images)]
        if not self._workers:
            start = [sys.executable, "-P", __file__]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self._workers = [subprocess.Popen(start, **pipes) for _ in range(count)]  # type: ignore[call-overload]
        starts = [len(images) * i // count for i in range(count + 1)]
        jobs = [
            self._pool.submit(_ask, worker, images[a:b], a)
            for worker, a, b in zip(self._workers, starts, starts[1:], strict=False)
        ]
        return [pixels for job in jobs for pixels in job.result()]


def decode_one(data: bytes, row: int) -> Pixels:
    """One image; `row` is told where it cannot be decoded."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            grey = image.mode in ("1", "L", "LA")
            pixels = np.asarray(image.convert("L" if grey else "RGB"))
    except Exception as error:  # whatever a broken file makes the library say
        raise DecodingError(row, str(error)) from error
    return pixels[..., None] if grey else pixels


def _ask(worker: subprocess.Popen[bytes], images: Sequence[bytes], first: int) -> list[Pixels]:
    assert worker.stdin is not None
    assert worker.stdout is not None
    _send(worker.stdin, [len(data) for data in images], images)
    answer, data = _receive(worker.stdout)
    if isinstance(answer, dict):
        raise DecodingError(first + answer["row"], answer["reason"])
    if len(answer) != len(images):
        raise DecodingError(first, "the process that decodes images ended")
    found, start = [], 0
    for shape in answer:
        size = int(np.prod(shape))
        found.append(np.frombuffer(data, np.uint8, size, start).reshape(shape))
        start += size
    return found


def _send(pipe: IO[bytes], head: Any, parts: Sequence[bytes]) -> None:
    text = json.dumps(head).encode()
    body = b"".join(parts)
    pipe.write(struct.pack("<QQ", len(text), len(body)) + text)
    pipe.write(body)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> tuple[Any, bytes]:
    sizes = pipe.read(16)
    if len(sizes) < 16:
        return [], b""
    text, body = struct.unpack("<QQ", sizes)
    return json.loads(pipe.read(text)), pipe.read(body)


def _work() -> None:
    """The worker: decodes batches until its input ends."""
    while True:
        sizes, data = _receive(sys.stdin.buffer)
        if not sizes:
            return
        ends = np.cumsum(sizes)
        try:
            images = [
                decode_one(data[e - s : e], i)
                for i, (s, e) in enumerate(zip(sizes, ends, strict=True))
            ]
        except DecodingError as error:
            _send(sys.stdout.buffer, {"row": error.row, "reason": error.reason}, [])
        else:
            _send(sys.stdout.buffer, [i.shape for i in images], [i.tobytes() for i in images])


if __name__ == "__main__":
    _work()
