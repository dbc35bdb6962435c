"""Rounds planned in time: by this process, or by others where a GPU would wait for the host.

Those are copies of this process that do nothing but plan, in turn, and write each round's work into
a pipe: as many rounds ahead as fit. A plan depends on (seed, round, client) alone, so it makes no
difference who draws it. Where one ends, or cannot be made, this process plans by itself.
"""

import gc
import os
import signal
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..plan import Plan
from ..tasks.partition import PerRound
from .work import Alike, Assignment, assignments

Numbers = NDArray[np.int64]


class Planned:
    """The work of each round's cohort; that of the next may be asked for ahead of it."""

    def __init__(self, plan: Plan, augments: bool, weighting: str) -> None:
        self._assignments = partial(assignments, plan, augments=augments, weighting=weighting)
        self._last: tuple[int, Sequence[Assignment]] | None = None
        self._ahead: list[Ahead] = []
        """The one whose turn it is first."""
        # A function that deals may need what a copy has not: other threads, or a device. A share of
        # a plan is for one process of several, which have enough to do.
        fixed = isinstance(plan, Plan) and not isinstance(plan.clients, PerRound)
        self._may_copy = sys.platform == "linux" and fixed

    def plan_ahead(self, go_on: bool = True) -> None:
        """From the next round on, has processes beside this one do the planning; or ends that."""
        if not go_on:
            self._ahead = []
        elif not self._ahead and self._may_copy:
            after, count = self._last[0] + 1 if self._last else 1, _copies()
            try:
                self._ahead = [Ahead(self._assignments, after + i, count) for i in range(count)]
            except OSError:  # there are no more processes to be had
                self._may_copy = False

    def work(self, round: int) -> Sequence[Assignment]:
        """The same object every time until another round is asked for."""
        if self._last is None or self._last[0] != round:
            found: Sequence[Assignment] | None = None
            if self._ahead:
                first, *others = self._ahead
                found = first.work(round)
                self._may_copy = self._may_copy and not first.failed
                self._ahead = [*others, first] if found is not None else []
            self._last = round, self._assignments(round) if found is None else found
        return self._last[1]


class Ahead:
    """The work of every so many rounds, from `first` on."""

    def __init__(
        self, planned: Callable[[int], Sequence[Assignment]], first: int, every: int = 1
    ) -> None:
        import fcntl  # not on every system, as copies of a process are not

        self._next, self._every, self.failed = first, every, False
        self._pipe, end = os.pipe()
        with suppress(OSError):  # more than a usual pipe holds, for a round or two
            fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, 1 << 20)
        # A signal in between would find the copy at what this process is at.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
        try:
            pid = _copied()
            if pid == 0:
                _plan(planned, first, every, end)
            self.close = weakref.finalize(self, _end, self._pipe, pid, os.getpid())
        except BaseException:
            os.close(self._pipe)  # which ends a copy that there may be
            raise
        finally:
            os.close(end)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def work(self, round: int) -> Sequence[Assignment] | None:
        """The work of this round; None, and for ever, if it was not planned."""
        found = None
        if self.close.alive and round == self._next:
            self._next += self._every
            found = _read(self._pipe)
            self.failed = found is None
        if found is None:
            self.close()
            return None
        return _assignments(found)


_MOST = 3
_ENDS = {signal.SIGINT, signal.SIGTERM}


def _copied() -> int:
    with warnings.catch_warnings():
        # Of threads: the copy needs none of them, and neither torch's products nor the device.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _copies() -> int:
    """How many plan: more than a GPU can be in need of, but on a small machine."""
    return max(1, min(_MOST, len(os.sched_getaffinity(0)) - 1))


def _plan(
    planned: Callable[[int], Sequence[Assignment]], round: int, every: int, pipe: int
) -> None:
    """All that the copy does, until nobody reads what it writes."""
    try:
        gc.disable()  # what is freed here may be the device's
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that reads decides when to end
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDS)
        for other in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
            if other > 2 and other != pipe:  # locks and pipes of the process that reads
                with suppress(OSError):
                    os.close(other)
        while True:
            _write(pipe, _numbers(planned(round)))
            round += every
    finally:
        os._exit(0)


def _end(pipe: int, pid: int, owner: int) -> None:
    os.close(pipe)
    if os.getpid() != owner:  # another copy, whose child it is not
        return
    with suppress(ChildProcessError):
        if os.waitpid(pid, os.WNOHANG)[0] == 0:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _write(pipe: int, numbers: Numbers) -> None:
    left = np.concatenate([[len(numbers)], numbers]).data.cast("B")
    while left:
        left = left[os.write(pipe, left) :]


def _read(pipe: int) -> Numbers | None:
    count = _filled(pipe, np.empty(1, np.int64))
    return None if count is None else _filled(pipe, np.empty(int(count[0]), np.int64))


def _filled(pipe: int, numbers: Numbers) -> Numbers | None:
    left = numbers.data.cast("B")
    while left:
        got = os.readv(pipe, [left])
        if got == 0:
            return None
        left = left[got:]
    return numbers


def _numbers(work: Sequence[Assignment]) -> Numbers:
    """All of it as one row of whole numbers, kind by kind, since a client's own are few."""
    draws = [each.draws for each in work if each.draws is not None]
    columns = [
        np.array([len(work), len(draws)]),
        np.array([[e.client, len(e.rows), len(e.order), len(e.sizes)] for e in work]).T,
        np.array([e.weight for e in work], np.float64).view(np.int64),
        np.array([size for e in work for size in e.sizes]),
        *(tensor.numpy() for kind in zip(*map(_tensors, work), strict=True) for tensor in kind),
        *(tensor.numpy() for tensor in draws),
    ]
    return np.concatenate([column.reshape(-1) for column in columns], dtype=np.int64)


def _tensors(each: Assignment) -> tuple[Tensor, Tensor, Tensor]:
    return each.rows, each.order, each.keys


def _assignments(numbers: Numbers) -> Sequence[Assignment]:
    clients, drawn = (int(n) for n in numbers[:2])
    ids, rows, order, steps = numbers[2 : 2 + 4 * clients].reshape(4, clients).tolist()
    totals = [clients, sum(steps), sum(rows), sum(order), sum(steps)]
    ends = list(accumulate(totals, initial=2 + 4 * clients))
    weights, sizes, *parts = (numbers[a:b] for a, b in pairwise(ends))
    weight: list[float] = weights.view(np.float64).tolist()
    tensors = [torch.from_numpy(part) for part in parts]
    every = torch.from_numpy(numbers[ends[-1] :].reshape(totals[3], -1)) if drawn else None
    counts = (rows, order, steps)
    if all(len({*count}) == 1 for count in counts):
        of_each = sizes.reshape(clients, steps[0])
        if (of_each == of_each[0]).all():
            held, taken, keys = (
                tensor.view(clients, count[0])
                for tensor, count in zip(tensors, counts, strict=True)
            )
            draws = None if every is None else every.view(clients, order[0], -1)
            return Alike(ids, weight, tuple(of_each[0].tolist()), held, taken, keys, draws)
    split = [torch.split(tensor, count) for tensor, count in zip(tensors, counts, strict=True)]
    drawn_by = [None] * clients if every is None else torch.split(every, order)
    all_sizes, first = sizes.tolist(), [*accumulate(steps, initial=0)]
    return [
        Assignment(ids[i], own, batches, tuple(all_sizes[a:b]), drawn_by[i], keys, weight[i])
        for i, (own, batches, keys, (a, b)) in enumerate(zip(*split, pairwise(first), strict=True))
    ]
