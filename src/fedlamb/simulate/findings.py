"""What is told of a finished round: numbers that are read off the device together."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..trees import Tree


class Told(NamedTuple):
    """A round's findings as plain numbers."""

    metrics: dict[str, float]
    diverged: bool


class Findings(NamedTuple):
    """A round's findings on the device, which may still be at work on them."""

    names: list[str]
    values: Tensor

    @staticmethod
    def of(loss: Tensor, params: Tree, measured: Mapping[str, Tensor]) -> "Findings":
        """The loss in training, what was measured afterwards, and whether the model diverged."""
        numbers = [loss, *measured.values(), not_finite(params, loss)]
        values = torch.stack([number.to(torch.float64) for number in numbers])
        return Findings(["train_loss", *measured], values)


def read(findings: Sequence[Findings]) -> list[Told]:
    """The numbers; waits for the device, once for all rounds."""
    rows = torch.stack([each.values for each in findings]).tolist()
    return [
        Told(dict(zip(each.names, row, strict=False)), bool(row[-1]))
        for each, row in zip(findings, rows, strict=True)
    ]


def not_finite(params: Tree, like: Tensor) -> Tensor:
    """Whether any of the numbers is not finite; on the device of `like`."""
    some = [p for p in params.values() if p.numel()]
    if not some:
        return torch.zeros((), dtype=torch.bool, device=like.device)
    return ~torch.stack(torch._foreach_norm(some, math.inf)).isfinite().all()
