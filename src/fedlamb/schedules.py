"""Learning-rate schedules: the round's number (from 1) -> a factor on the rate.

Any callable will do; the factor is constant within a round.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Real

from .errors import SettingError, is_whole

Schedule = Callable[[int], float]


def constant(round: int) -> float:
    """The same rate in every round."""
    return 1.0


@dataclass(frozen=True)
class StepDecay:
    """Multiplies the rate by `factor` after each of the rounds in `after`.

    `StepDecay(after=(30, 70))` divides by ten from round 31 on, and again from round 71 on.
    """

    after: tuple[int, ...]
    factor: float = 0.1

    def __post_init__(self) -> None:
        rounds = self.after if isinstance(self.after, Iterable) else None
        if rounds is None or not all(is_whole(r) and r >= 1 for r in rounds):
            raise SettingError(
                "schedule.after", self.after, "must be round numbers from 1 on, such as [30, 70]"
            )
        object.__setattr__(self, "after", tuple(int(r) for r in rounds))
        if not isinstance(self.factor, Real) or not 0 < self.factor < float("inf"):
            raise SettingError("schedule.factor", self.factor, "must be a positive number")

    def __call__(self, round: int) -> float:
        return float(self.factor ** sum(round > r for r in self.after))
