"""A round spread over processes: each runs the clients that it owns, one all-reduce joins them."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..plan import Plan
from ..trees import Tree
from .crew import Crew
from .work import Collected, Executor, OnClient, Upload


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
        """Those whose state it keeps; where clients keep none, an even share, of which the leader,
        who also writes what there is to keep, has the smallest."""
        whole = self.plan.cohort(round)
        if self.stateless:
            last_first = self.crew.size - 1 - self.crew.rank
            return whole[last_first :: self.crew.size]
        return [c for c in whole if self.crew.owns(c)]

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


class Distributed:
    """Runs this process's share on another executor, and joins the crew's reports."""

    def __init__(self, executor: Executor, share: Share, weighting: str) -> None:
        self.executor, self.share, self.weighting = executor, share, weighting

    def run(self, round: int, sent: Any, buffers: Tree, on_client: OnClient) -> Collected:
        """One round of the whole cohort; its states are those of this process's clients."""
        crew = self.share.crew
        own = self.share.own(round)
        found = self.executor.run(round, sent, buffers, on_client)
        weight = float(len(own))
        if self.weighting == "examples":
            weight = float(sum(len(self.share.rows(round, c)) for c in own))
        change = {n: found.buffers[n] - b for n, b in buffers.items() if b.is_floating_point()}
        mean: Upload = crew.mean(Upload(found.report, change, {"loss": found.loss}), weight)
        counters = crew.largest({n: b for n, b in found.buffers.items() if n not in change})
        moved = {n: b + mean.buffers[n] if n in change else counters[n] for n, b in buffers.items()}
        states = {c: found.states[c] for c in own}
        return Collected(mean.report, moved, mean.loss["loss"], states)
