"""Learning-rate schedules: the round's number (from 1) -> a factor on the rate.

Any callable will do; the factor is constant within a round.
"""

from collections.abc import Callable
from dataclasses import dataclass

from .errors import SettingError

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
        object.__setattr__(self, "after", tuple(self.after))
        if not all(type(r) is int and r >= 1 for r in self.after):
            raise SettingError("schedule.after", self.after, "must be round numbers from 1 on")
        if isinstance(self.factor, bool) or not 0 < self.factor < float("inf"):
            raise SettingError("schedule.factor", self.factor, "must be a positive number")

    def __call__(self, round: int) -> float:
        return float(self.factor ** sum(round > r for r in self.after))
