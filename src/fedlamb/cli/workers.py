"""The other processes of a run on one machine: started here, and never left behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ..local_round import local_round
from ..randomness import own_random_state
from ..simulate.crew import leave
from ..simulate.fit import Run
from ..simulate.loop import Autograd
from ..simulate.saying import leads
from ..simulate.work import Assignment, assignments
from ..tasks.images import Batch


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
        leave()
        for other in others:
            other.terminate()
        for other in others:
            other.wait()
        os.environ.clear()
        os.environ.update(before)


def best_number(run: Run, runs: int) -> tuple[int, str]:
    """How many workers would end so many runs like this one soonest, and why.

    Some steps are timed with the threads that each worker would have. More workers than one must
    make up for the seconds that they take to start.
    """
    cores = os.cpu_count() or 1
    if run.task.device.type != "cpu" or run.executor != "loop" or cores == 1:
        return 1, "more do not help here"
    work = assignments(run.plan, 1, run.task.augments, run.weighting)
    threads = torch.get_num_threads()
    seconds = {}
    workers = 1
    while workers <= min(cores, len(work)):
        torch.set_num_threads(max(1, cores // workers))
        whole = seconds_of_clients(run, work, timed=4) * run.rounds * runs
        seconds[workers] = whole / workers + (_START if workers > 1 else 0)
        workers *= 2
    torch.set_num_threads(threads)
    best = min(seconds, key=lambda n: seconds[n])
    said = ", ".join(f"{n}: {s:.0f} s" for n, s in seconds.items())
    return best, f"estimated for the whole: {said}"


def seconds_of_clients(run: Run, work: Sequence[Assignment], timed: int) -> float:
    """Of these clients one after another by plain autograd, estimated from the first one: its
    beginning and end, and so many of its local steps."""
    first, gradients = work[0], Autograd(run.task)
    sent, data = run.algorithm.broadcast(run.server), Batch(first.rows)
    batches = first.batches()[:timed]

    def seconds(some: list[Batch]) -> float:
        found: list[float] = []
        while len(found) < 2 or (len(found) < 4 and sum(found) < _ENOUGH):
            begun = time.perf_counter()
            state = run.store.state(first.client)
            with own_random_state(run.task.device):
                local_round(run.algorithm, gradients, state, sent, run.buffers, data, some)
            found.append(time.perf_counter() - begun)
        return min(found[1:])

    around = seconds([])
    step = max(0.0, seconds(batches) - around) / len(batches)
    return len(work) * around + step * sum(len(each.sizes) for each in work)


_ENOUGH = 2.0  # seconds spent on timing
_START = 5.0  # seconds until workers have loaded torch and the data


def follow_quietly() -> None:
    """A process that does not lead leaves Ctrl-C to the one that does."""
    if not leads():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
