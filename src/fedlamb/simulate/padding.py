"""Clients of unequal sizes side by side: rows that only pad have weight 0."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .work import Assignment

Named = dict[str, Tensor]


class Schedule(NamedTuple):
    """Step for step: rows, clients at work, and whether some of them rest in some trial."""

    widths: tuple[int, ...]
    active: tuple[int, ...]
    resting: tuple[bool, ...]


def padded_batches(work: Sequence[Sequence[Assignment]]) -> tuple[Named, Schedule]:
    """The batches of all clients as (trials, clients, rows of all steps), and their schedule."""
    everyone = [each for trial in work for each in trial]
    steps = torch.tensor([[len(each.batches) for each in trial] for trial in work])
    numbers = range(int(steps.max()))
    sizes = [[len(b.rows) for b in each.batches] for each in everyone]
    widths = tuple(max(s[i] for s in sizes if i < len(s)) for i in numbers)
    at_work = [(steps > i).sum(dim=1) for i in numbers]
    schedule = Schedule(
        widths,
        tuple(int(counts.max()) for counts in at_work),
        tuple(bool((counts < counts.max()).any()) for counts in at_work),
    )
    found: Named = {"steps": steps}
    equal = all(tuple(s) == widths for s in sizes)
    for name in ("rows", "draws"):
        if getattr(everyone[0].batches[0], name) is not None:
            lines = [
                torch.cat([getattr(b, name) for b in each.batches])
                if equal
                else _line([getattr(b, name) for b in each.batches], widths)
                for each in everyone
            ]
            found[name] = torch.stack(lines).reshape(*steps.shape, *lines[0].shape)
    if not equal:
        shares = [
            _line([_equal_shares(len(b.rows)) for b in each.batches], widths) for each in everyone
        ]
        found["weights"] = torch.stack(shares).reshape(*steps.shape, -1)
    keys = torch.zeros((*steps.shape, len(widths)), dtype=torch.int64)
    for place, each in zip(keys.flatten(0, 1), everyone, strict=True):
        place[: len(each.batches)] = torch.stack([b.key for b in each.batches if b.key is not None])
    found["key"] = keys
    return found, schedule


def _line(parts: Sequence[Tensor], widths: Sequence[int]) -> Tensor:
    """The parts side by side, each at the place of its step, zeros elsewhere."""
    line = parts[0].new_zeros((sum(widths), *parts[0].shape[1:]))
    first = 0
    for part, width in zip(parts, widths, strict=False):
        line[first : first + len(part)] = part
        first += width
    return line


def padded_data(work: Sequence[Sequence[Assignment]]) -> Named:
    """All rows of each client as (trials, clients, rows)."""
    rows = [each.data.rows for trial in work for each in trial]
    shape = (len(work), len(work[0]))
    most = max(len(r) for r in rows)
    found = {"rows": torch.stack([_line([r], [most]) for r in rows]).reshape(*shape, most)}
    if any(len(r) < most for r in rows):
        shares = [_line([_equal_shares(len(r))], [most]) for r in rows]
        found["weights"] = torch.stack(shares).reshape(*shape, most)
    return found


def _equal_shares(count: int) -> Tensor:
    return torch.full((count,), 1 / count, dtype=torch.float64)
