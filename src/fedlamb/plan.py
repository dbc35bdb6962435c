"""Who takes part and which rows each local step sees: a pure function of (seed, round, client).

Nothing here keeps state or touches a global generator, so any process, on any machine, can
rebuild exactly the batches of any client in any round.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .tasks.images import DRAWS
from .tasks.partition import PerRound, Rows

# One stream per purpose, so that a draw for one never shifts another.
_COHORT, _BATCHES, _MODEL, _DEAL, _AUGMENT = range(5)


def cohort_size(n: int, fraction: float) -> int:
    """max(1, floor(fraction * n))"""
    # The tolerance undoes the rounding of products such as 0.29 * 100 = 28.999999999999996.
    return max(1, int(fraction * n + 1e-9))


@dataclass(frozen=True)
class Plan:
    """The schedule of a whole run.

    `clients[i]` are the rows of client i, or all rows are dealt anew in each round; `fraction` of
    the clients take part in a round, drawn uniformly without replacement; each goes `epochs`
    times through its rows in a fresh order, in batches of `batch_size`, the last of which may be
    smaller.
    """

    clients: Rows | PerRound
    fraction: float
    batch_size: int
    epochs: int
    seed: int

    def cohort(self, round: int) -> list[int]:
        """The clients of this round, in ascending order: max(1, floor(fraction * n)) of them."""
        n = self.clients.n if isinstance(self.clients, PerRound) else len(self.clients)
        found: list[int] = _drawn(self.seed, round, n, cohort_size(n, self.fraction)).tolist()
        return found

    def rows(self, round: int, client: int) -> Tensor:
        """All rows that the client holds in this round."""
        if isinstance(self.clients, PerRound):
            return _dealt(self, round)[client]
        rows: Tensor = self.clients[client]
        return rows

    def counts(self) -> NDArray[np.int64]:
        """How many rows each client holds; where all are dealt anew in each round, in the first."""
        if isinstance(self.clients, PerRound):
            return np.array([len(rows) for rows in _dealt(self, 1).values()])
        counts: NDArray[np.int64] = self.clients.sizes.numpy()
        return counts

    @cached_property
    def repeats(self) -> bool:
        """Whether the clients of every round have the same sizes, as far as can be known."""
        counts = self.counts()
        if isinstance(self.clients, PerRound):
            later = [len(rows) for rows in _dealt(self, 2).values()]
            return sorted(counts.tolist()) == sorted(later)
        return len(np.unique(counts)) == 1 or cohort_size(len(counts), self.fraction) == len(counts)

    def steps(self, round: int, client: int) -> tuple[Tensor, Tensor]:
        """The rows of all local steps, one after another, and a key for each step, which decides
        layers such as dropout."""
        rows = self.rows(round, client).numpy()
        draw = self._generator(_BATCHES, round, client)
        orders = [draw.permutation(rows) for _ in range(self.epochs)]
        keys = draw.integers(-(2**63), 2**63 - 1, size=len(self.sizes(len(rows))))
        order = orders[0] if self.epochs == 1 else np.concatenate(orders)
        return torch.from_numpy(order), torch.from_numpy(keys)

    def sizes(self, count: int) -> tuple[int, ...]:
        """How many rows each local step of a client with so many rows has."""
        whole, rest = divmod(count, self.batch_size)
        return ((self.batch_size,) * whole + ((rest,) if rest else ())) * self.epochs

    def batches(self, round: int, client: int) -> list[Tensor]:
        """The rows of each local step, in order."""
        sizes = self.sizes(len(self.rows(round, client)))
        return list(torch.split(self.steps(round, client)[0], list(sizes)))

    def draws(self, round: int, client: int, count: int) -> Tensor:
        """Whole numbers (count, 3) that decide how each example of the round is augmented."""
        draw = self._generator(_AUGMENT, round, client)
        return torch.from_numpy(draw.integers(2**31, size=(count, DRAWS)))

    def model_seed(self, round: int, client: int) -> int:
        """The seed for random layers of one's own, which take no key, in this client's round."""
        key = np.random.SeedSequence([self.seed, _MODEL, round, client])
        return int(key.generate_state(1, np.uint64)[0])

    def _generator(self, *key: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *key])


@lru_cache(maxsize=8)  # a few seeds' rounds, the one under way and the next
def _drawn(seed: int, round: int, n: int, k: int) -> NDArray[np.int64]:
    """k of n clients, in ascending order."""
    draw = np.random.default_rng([seed, _COHORT, round])
    return np.sort(draw.choice(n, size=k, replace=False))


@lru_cache(maxsize=2)
def _dealt(plan: Plan, round: int) -> dict[int, Tensor]:
    """The rows of each active client, where the whole set is dealt anew in each round."""
    assert isinstance(plan.clients, PerRound)
    cohort = plan.cohort(round)
    seed = np.random.SeedSequence([plan.seed, _DEAL, round]).generate_state(1, np.uint64)[0]
    return dict(zip(cohort, plan.clients.deal(len(cohort), int(seed)), strict=True))
