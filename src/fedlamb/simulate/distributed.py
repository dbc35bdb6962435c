"""A round spread over processes: each runs an even share of the clients, one all-reduce joins them.

A client's state lives with the process that owns the client. Where one owns more of a cohort than
its share, the state of each client beyond it visits another process for the round.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..plan import Plan
from ..trees import Tree
from .client_store import ClientStore
from .crew import Crew
from .work import Collected, Executor, OnClient, Upload


class Visit(NamedTuple):
    """A client that is run by another process than its own."""

    client: int
    home: int
    host: int


@dataclass(frozen=True)
class Share:
    """The part of a plan that one process of a crew runs; the same to an executor as a whole."""

    plan: Plan
    crew: Crew
    stateless: bool

    def cohort(self, round: int) -> list[int]:
        """The clients that this process runs. Where it has none, the first of all, whose work
        then counts for nothing: what a report looks like is known only once there is one."""
        return self.own(round) or self.plan.cohort(round)[:1]

    def own(self, round: int) -> list[int]:
        """Its even share. Where clients keep no state the leader, who also writes what there is to
        keep, has the smallest."""
        whole = self.plan.cohort(round)
        if self.stateless:
            last_first = self.crew.size - 1 - self.crew.rank
            return whole[last_first :: self.crew.size]
        hosts = balanced(whole, self.crew)
        return [c for c in whole if hosts[c] == self.crew.rank]

    def visits(self, round: int) -> list[Visit]:
        """The clients of the round that any process runs for another, in one order for all."""
        if self.stateless:
            return []
        hosts = balanced(self.plan.cohort(round), self.crew)
        each = [Visit(client, self.crew.owner(client), host) for client, host in hosts.items()]
        return sorted(visit for visit in each if visit.home != visit.host)

    def counts(self) -> NDArray[np.int64]:
        return self.plan.counts()

    @property
    def repeats(self) -> bool:
        return self.plan.repeats

    def rows(self, round: int, client: int) -> Tensor:
        return self.plan.rows(round, client)

    def steps(self, round: int, client: int) -> tuple[Tensor, Tensor]:
        return self.plan.steps(round, client)

    def sizes(self, count: int) -> tuple[int, ...]:
        return self.plan.sizes(count)

    def draws(self, round: int, client: int, count: int) -> Tensor:
        return self.plan.draws(round, client, count)

    def model_seed(self, round: int, client: int) -> int:
        return self.plan.model_seed(round, client)


def balanced(cohort: Sequence[int], crew: Crew) -> dict[int, int]:
    """Client -> the process that runs it: its owner's, unless that has its share without it.

    A function of the cohort alone, so that a resumed run sums in the same order.
    """
    owned = [[c for c in cohort if crew.owner(c) == rank] for rank in range(crew.size)]
    least, more = divmod(len(cohort), crew.size)
    # Shares differ by one at most; who owns most has a larger one, so that few states travel.
    most_first = sorted(range(crew.size), key=lambda rank: (-len(owned[rank]), -rank))
    share = {rank: least + (place < more) for place, rank in enumerate(most_first)}
    hosts = {client: rank for rank in share for client in owned[rank][: share[rank]]}
    free = [rank for rank in share for _ in range(share[rank] - len(owned[rank]))]
    return hosts | dict(zip((c for c in cohort if c not in hosts), free, strict=True))


class Distributed:
    """Runs this process's share on another executor, and joins the crew's reports."""

    def __init__(
        self, executor: Executor, share: Share, weighting: str, store: ClientStore
    ) -> None:
        self.executor, self.share, self.weighting = executor, share, weighting
        self.store = store

    def run(self, round: int, sent: Any, buffers: Tree, on_client: OnClient) -> Collected:
        """One round of the whole cohort; its states are those of this process's clients."""
        crew = self.share.crew
        own, visits = self.share.own(round), self.share.visits(round)
        here = [visit for visit in visits if crew.rank in (visit.home, visit.host)]
        for client, home, host in here:
            state = crew.handed_over(self.store.state(client), home, host)
            if crew.rank == host:
                self.store.guests[client] = state
        try:
            found = self.executor.run(round, sent, buffers, on_client)
        finally:
            self.store.guests.clear()
        weight = float(len(own))
        if self.weighting == "examples":
            weight = float(sum(len(self.share.rows(round, c)) for c in own))
        change = {n: found.buffers[n] - b for n, b in buffers.items() if b.is_floating_point()}
        mean: Upload = crew.mean(Upload(found.report, change, {"loss": found.loss}), weight)
        counters = crew.largest({n: b for n, b in found.buffers.items() if n not in change})
        moved = {n: b + mean.buffers[n] if n in change else counters[n] for n, b in buffers.items()}
        states = {c: found.states[c] for c in own}
        for client, home, host in here:
            state = crew.handed_over(states.pop(client, self.store.fresh()), host, home)
            if crew.rank == home:
                states[client] = state
        return Collected(mean.report, moved, mean.loss["loss"], states)

    def prepare(self, round: int) -> None:
        """Ahead of the round: this process's share."""
        self.executor.prepare(round)
