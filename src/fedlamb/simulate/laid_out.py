"""The work of a round's cohorts as tensors on the device: batches, all rows, shares in the mean."""

from collections.abc import Sequence
from operator import is_
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .padding import Named, Schedule, padded_batches, padded_data
from .work import Alike, Assignment, weights_of

Cohorts = Sequence[Sequence[Assignment]]
"""The work of each trial."""


class LaidOut(NamedTuple):
    """The work of some clients, on the device but for the schedule."""

    schedule: Schedule
    batches: Named
    data: Named
    shares: Tensor


class Layout:
    """Lays work out, that of the next round ahead of it."""

    def __init__(self, like: Tensor, keyed: bool) -> None:
        """`like` tells device and dtype; keyed: whether random layers take a key for each step."""
        self._like, self._keyed = like, keyed
        self._ready: tuple[Cohorts, LaidOut] | None = None
        self._shares: tuple[list[list[float]], Tensor] | None = None

    def prepare(self, work: Cohorts) -> None:
        """Lays out this work before it is asked for."""
        self._ready = work, self._laid_out(work)

    def of(self, work: Cohorts) -> LaidOut:
        """This work, which may lie ready."""
        if self._ready is not None and _same_work(self._ready[0], work):
            ready, self._ready = self._ready[1], None
            return ready
        return self._laid_out(work)

    def _laid_out(self, work: Cohorts) -> LaidOut:
        batches, schedule = padded_batches(work)
        if not self._keyed:
            del batches["key"]
        batches, data = _moved([batches, padded_data(work)], self._like)
        return LaidOut(schedule, batches, data, self._shares_of(work))

    def _shares_of(self, work: Cohorts) -> Tensor:
        """Each client's in the mean; the same tensor for as long as it is the same."""
        each = [weights_of(trial) for trial in work]
        if self._shares is None or self._shares[0] != each:
            weights = torch.tensor(each, dtype=torch.float64)
            self._shares = each, (weights / weights.sum(dim=1, keepdim=True)).to(self._like)
        return self._shares[1]


def longest_first(work: Sequence[Assignment]) -> Sequence[Assignment]:
    """The same work with the clients of most steps in front."""
    return work if isinstance(work, Alike) else sorted(work, key=lambda each: -len(each.sizes))


def part_of(work: Sequence[Assignment], first: int, count: int) -> Sequence[Assignment]:
    """That of so many clients; all of it stays the object that it is."""
    return work if count >= len(work) else work[first : first + count]


def _same_work(one: Cohorts, two: Cohorts) -> bool:
    """Whether these are the very same objects."""
    if [len(trial) for trial in one] != [len(trial) for trial in two]:
        return False
    return all(a is b or all(map(is_, a, b)) for a, b in zip(one, two, strict=True))


def _moved(parts: Sequence[Named], like: Tensor) -> list[Named]:
    """On the device of `like`; of its dtype where floating. One copy for all numbers of a kind."""
    found = [dict(part) for part in parts]
    for floating, dtype in ((False, torch.int64), (True, like.dtype)):
        some = [(p, n) for p in found for n, t in p.items() if t.is_floating_point() is floating]
        if some:
            there = _copied([part[name] for part, name in some], dtype, like.device)
            for (part, name), tensor in zip(some, there, strict=True):
                part[name] = tensor
    return found


def _copied(tensors: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    sizes = [tensor.numel() for tensor in tensors]
    # Out of other memory, a copy would wait until the device is idle. The memory is new each time:
    # torch gives it to no one else while a copy out of it is still under way.
    staged = torch.empty(sum(sizes), dtype=dtype, pin_memory=device.type == "cuda")
    # By numpy, in one thread: to wake the others would take longer than so small a copy.
    parts = [_bytes(tensor.to(dtype)) for tensor in tensors]
    np.concatenate(parts, out=_bytes(staged))
    there = torch.split(staged.to(device, non_blocking=True), sizes)
    return [part.view(tensor.shape) for part, tensor in zip(there, tensors, strict=True)]


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """A tensor's memory, of whatever dtype."""
    found: NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return found
