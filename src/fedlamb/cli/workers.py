"""The other processes of a run on one machine: started here, and never left behind."""

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch

from ..errors import SettingError
from ..experiment import device_of
from ..local_round import local_round
from ..randomness import own_random_state
from ..settings import Engine
from ..simulate.compiled_loop.program import load_compiler
from ..simulate.crew import CrewError, leave
from ..simulate.fit import Run
from ..simulate.loop import Autograd
from ..simulate.saying import leads
from ..simulate.work import Assignment, assignments
from ..tasks.images import Batch


@contextmanager
def crew_of(workers: int, engine: Engine) -> Iterator[None]:
    """Runs the block in workers - 1 more processes as well; torchrun has started them itself."""
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
    before = dict(os.environ)
    others: list[_Process] = []
    copies = can_be_copied(workers, device_of(engine))
    torch.set_num_threads(threads)
    if copies:
        if engine.compile:
            load_compiler()
        gc.collect()
        gc.freeze()  # or else the first collection would write on every page of memory
    try:
        for rank in range(1, workers):
            place = {**group, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            if not copies:
                others.append(_started_anew(place))
                continue
            process = _copied()
            if process is None:
                os.environ.update(place)
                with _to_its_end():
                    yield
            else:
                others.append(process)
        os.environ.update({**group, "RANK": "0", "LOCAL_RANK": "0"})
        yield
    finally:
        leave()
        for other in others:
            other.terminate()
        for other in others:
            other.wait()
        os.environ.clear()
        os.environ.update(before)


def can_be_copied(workers: int, device: torch.device) -> bool:
    """Whether processes may be copies of this one: at work at once, and with its memory in common.

    A GPU's driver and the threads of a product do not survive a copy.
    """
    alone = (os.cpu_count() or 1) // workers <= 1 and threading.active_count() == 1
    return sys.platform == "linux" and device.type == "cpu" and alone


class _Process(Protocol):
    def terminate(self) -> None: ...
    def wait(self) -> int: ...


class _Copy(NamedTuple):
    pid: int

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)  # at least as a zombie it is there until `wait`

    def wait(self) -> int:
        return os.waitpid(self.pid, 0)[1]


def _copied() -> _Copy | None:
    """A copy of this process; None in the copy."""
    with warnings.catch_warnings():
        # Of threads: the only ones there can be are idle, those of products.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    return _Copy(pid) if pid else None


@contextmanager
def _to_its_end() -> Iterator[None]:
    """Runs the block as all that a copy does: it never returns to what the first process was at."""
    follow_quietly()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    code = 1
    try:
        yield
        code = 0
    except (Exception, KeyboardInterrupt) as error:
        if not isinstance(error, (*_TOLD, KeyboardInterrupt)):  # the first process says it
            traceback.print_exc()
    finally:
        leave()
        os._exit(code)


def _started_anew(environment: Mapping[str, str]) -> _Process:
    """A process of this very command."""
    command = [sys.executable, "-m", "fedlamb", *sys.argv[1:]]
    variables = {**os.environ, **environment}
    return subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL)


def best_number(run: Run, runs: int) -> tuple[int, str]:
    """How many workers would end so many runs like this one soonest, and why.

    Some steps are timed with the threads that each worker would have. More workers than one must
    make up for the seconds that they take to start, unless they are copies of this process.
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
        at_once = workers == 1 or can_be_copied(workers, run.task.device)
        seconds[workers] = whole / workers + (0 if at_once else _START)
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


_TOLD = (SettingError, CrewError, OSError)
"""Errors that end the command with a sentence."""

_ENOUGH = 2.0  # seconds spent on timing
_START = 5.0  # seconds until processes have loaded torch and the data


def follow_quietly() -> None:
    """A process that does not lead leaves Ctrl-C to the one that does."""
    if not leads():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
