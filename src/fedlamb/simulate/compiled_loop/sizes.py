"""Which sizes of batches are compiled: the most frequent ones.

The plan alone decides, not which sizes come first: a run that goes on after a stop, and each of its
workers, then takes every step as the whole run would, to the same bits.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ...tasks.task import CHUNK

_MOST = 4  # sizes; each takes seconds to compile, up to half a minute
_RARE = 1 / 50  # of all batches; a size that is rarer is not worth those seconds


class Planned(Protocol):
    """What is known of a run's batches before it begins."""

    def counts(self) -> NDArray[np.int64]: ...
    def sizes(self, count: int) -> Iterable[int]: ...


class Sizes(NamedTuple):
    """Sizes of batches that are compiled."""

    steps: frozenset[int]
    """Of local steps."""
    full: frozenset[int]
    """Of the parts in which the gradient over all of a client's rows is taken."""

    @staticmethod
    def of(plan: Planned) -> "Sizes":
        """Those of this plan."""
        return Sizes(_frequent(plan, plan.sizes), _frequent(plan, parts))


def parts(count: int) -> list[int]:
    """The sizes of the parts of so many rows, each at most CHUNK."""
    number = -(-count // CHUNK)
    least, more = divmod(count, number)
    return [least + 1] * more + [least] * (number - more)


def _frequent(plan: Planned, sizes_of: Callable[[int], Iterable[int]]) -> frozenset[int]:
    batches = Counter[int]()
    for count, clients in zip(*np.unique(plan.counts(), return_counts=True), strict=True):
        for size, times in Counter(sizes_of(int(count))).items():
            batches[size] += times * int(clients)
    ranked = sorted(batches, key=lambda size: (-batches[size], -size))
    return frozenset(s for s in ranked[:_MOST] if batches[s] >= _RARE * batches.total())
