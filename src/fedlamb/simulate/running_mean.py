"""The weighted mean of reports, one at a time: memory does not grow with the cohort."""

from typing import Any

from .. import trees


class RunningMean:
    """Weighted mean of (nested) NamedTuples of trees. Equal reports give exactly that report."""

    def __init__(self) -> None:
        self.value: Any = None
        self._weight = 0.0

    def add(self, report: Any, weight: float) -> None:
        """Takes one more report into the mean."""
        self._weight += weight
        self.value = (
            report if self.value is None else _lerp(self.value, report, weight / self._weight)
        )


def _lerp(mean: Any, new: Any, share: float) -> Any:
    if isinstance(mean, dict):
        return trees.lerp(mean, new, share)
    return type(mean)(*(_lerp(a, b, share) for a, b in zip(mean, new, strict=True)))
