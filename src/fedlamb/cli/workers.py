"""The other processes of a run on one machine: started here, and never left behind."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def leads() -> bool:
    """Whether this process writes and speaks; the only one does."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def crew_of(workers: int) -> Iterator[None]:
    """Starts workers - 1 more processes of this very command; torchrun has started them itself."""
    if workers == 1 or "WORLD_SIZE" in os.environ:
        yield
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = max(1, (os.cpu_count() or 1) // workers)
    group = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(workers),
        "OMP_NUM_THREADS": str(threads),
    }
    others = [
        subprocess.Popen(
            [sys.executable, "-m", "fedlamb", *sys.argv[1:]],
            env={**os.environ, **group, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
        )
        for rank in range(1, workers)
    ]
    before = dict(os.environ)
    os.environ.update({**group, "RANK": "0", "LOCAL_RANK": "0"})
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        for other in others:
            other.terminate()
        for other in others:
            other.wait()
        os.environ.clear()
        os.environ.update(before)


def follow_quietly() -> None:
    """A process that does not lead leaves Ctrl-C to the one that does."""
    if not leads():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
