"""Trials side by side: processes that run one at a time each, asked in lines of JSON.

Run as a module this is such a process. It ends with the one that asks, however that ends.
"""

import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import FrameType
from typing import Any, NamedTuple

import torch

from ..settings import Experiment, validate
from ..simulate.crew import CrewError
from ..simulate.sweep import Together
from .results import Line
from .trials import Bench, Told

_ENDED = "a process that ran trials has ended; the same command goes on from what it saved"


class Job(NamedTuple):
    """A trial to be run."""

    method: str
    values: dict[str, Any]
    experiment: Experiment
    partial: Path
    """Keeps its rounds while it runs."""


class Workers:
    """So many processes, started when they are first needed; leaving the context ends them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._processes: list[subprocess.Popen[str]] = []
        self._threads: list[Thread] = []
        self._torch_threads = torch.get_num_threads()

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *error: object) -> None:
        torch.set_num_threads(self._torch_threads)
        for process in self._processes:
            process.send_signal(signal.SIGINT)  # so that each saves the rounds that it has done
        for process in self._processes:
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for thread in self._threads:
            thread.join()  # it reads what an ended process has left
        for process in self._processes:
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):  # where something was left to send
                    if pipe is not None:
                        pipe.close()

    def run(self, jobs: Sequence[Job], told: Told) -> Iterator[tuple[int, list[Line]]]:
        """The number of each job and the lines of its rounds, as the jobs end.

        told: rounds of all jobs that are done, rounds in all, best accuracy so far.
        """
        return self._ended(self._started(), jobs, told)

    def _ended(
        self, processes: Sequence["subprocess.Popen[str]"], jobs: Sequence[Job], told: Told
    ) -> Iterator[tuple[int, list[Line]]]:
        events: SimpleQueue[tuple[int, dict[str, Any]]] = SimpleQueue()
        waiting = deque(enumerate(jobs))
        each = [(process, waiting, events) for process in processes]
        self._threads = [Thread(target=_serve, args=args, daemon=True) for args in each]
        for thread in self._threads:
            thread.start()
        rounds = [job.experiment.federation.rounds for job in jobs]
        done, best = [0] * len(jobs), 0.0
        left = len(jobs)
        told(0, sum(rounds), None)
        while left:
            number, event = events.get()
            if "error" in event:
                raise CrewError(event["error"])
            if "lines" in event:
                left -= 1
                yield number, event["lines"]
            now = event.get("round", rounds[number])  # one that diverged has done all it can
            if now > done[number]:
                done[number], best = now, max(best, event.get("best") or 0.0)
                told(sum(done), sum(rounds), best)

    def _started(self) -> list["subprocess.Popen[str]"]:
        threads = max(1, (os.cpu_count() or 1) // self.count)
        torch.set_num_threads(threads)  # here as well: the results name the number
        beside = {k: v for k, v in os.environ.items() if k != "WORLD_SIZE"}
        for number in range(len(self._processes), self.count):
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", __name__],
                    env={**beside, "RANK": str(number), "OMP_NUM_THREADS": str(threads)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        return self._processes


def _serve(
    process: "subprocess.Popen[str]",
    waiting: "deque[tuple[int, Job]]",
    events: "SimpleQueue[tuple[int, dict[str, Any]]]",
) -> None:
    """Has one process run jobs for as long as there are any."""
    assert process.stdin is not None
    assert process.stdout is not None
    while True:
        try:
            number, job = waiting.popleft()
        except IndexError:
            return
        asked = {
            "method": job.method,
            "values": job.values,
            "experiment": job.experiment.model_dump(mode="json"),
            "partial": str(job.partial.absolute()),
        }
        event: dict[str, Any] = {}
        try:
            print(json.dumps(asked), file=process.stdin, flush=True)
            while not event.keys() & {"lines", "error"}:
                event = json.loads(process.stdout.readline())
                events.put((number, event))
        except (OSError, ValueError):
            events.put((number, {"error": _ENDED}))
            return


def _work() -> None:
    """The process that runs trials."""
    # What else prints must not come between the answers.
    answers, sys.stdout = sys.stdout, sys.stderr

    def answer(**event: Any) -> None:
        print(json.dumps(event), file=answers, flush=True)

    asked: SimpleQueue[str] = SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            asked.put(line)
        os._exit(1)  # nobody is left to answer

    def stop(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)  # a second one would come in the middle of saving
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    Thread(target=read, daemon=True).start()
    bench = Bench(Together())
    try:
        while True:
            job = json.loads(asked.get())
            experiment = validate(job["experiment"])
            try:
                (point,) = bench.points(job["method"], [(job["values"], experiment)])
                lines = bench.run_alone(
                    point,
                    Path(job["partial"]),
                    lambda done, total, best: answer(round=done, best=best),
                )
                answer(lines=lines)
            except Exception as error:
                answer(error=f"{job['method']} with {job['values']}: {error}")
    except KeyboardInterrupt:
        return


if __name__ == "__main__":
    _work()
