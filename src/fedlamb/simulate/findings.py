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
    """A round's findings, on their way from the device, which may still be at work on them."""

    names: list[str]
    values: Tensor
    there: torch.cuda.Event | None
    """When they have come; None: they are here."""

    @staticmethod
    def of(loss: Tensor, params: Tree, measured: Mapping[str, Tensor]) -> "Findings":
        """The loss in training, what was measured afterwards, and whether the model diverged."""
        numbers = [loss, *measured.values(), largest(params, loss)]
        values = torch.stack([number.to(torch.float64) for number in numbers])
        there = None
        if values.is_cuda:  # not behind what is sent to the device in the meantime
            stream = torch.cuda.current_stream(values.device)
            values = values.to("cpu", non_blocking=True)
            there = stream.record_event()
        return Findings(["train_loss", *measured], values, there)


def read(findings: Sequence[Findings]) -> list[Told]:
    """The numbers; waits for the device until it has them all."""
    told = []
    for names, values, there in findings:
        if there is not None:
            there.synchronize()
        *numbers, most = values.tolist()
        told.append(Told(dict(zip(names, numbers, strict=True)), not math.isfinite(most)))
    return told


def largest(params: Tree, like: Tensor) -> Tensor:
    """The largest absolute value, finite only where all are; on the device of `like`."""
    some = [p for p in params.values() if p.numel()]
    if not some:
        return like.new_zeros(())
    return torch.stack(torch._foreach_norm(some, math.inf)).amax()
