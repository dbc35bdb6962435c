"""Clients of unequal sizes side by side: rows that only pad have weight 0."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from .work import Alike, Assignment

Named = dict[str, Tensor]


class Schedule(NamedTuple):
    """Step for step: rows, clients at work, and whether some of them rest in some trial."""

    widths: tuple[int, ...]
    active: tuple[int, ...]
    resting: tuple[bool, ...]

    @property
    def even(self) -> bool:
        """Whether all clients take the same steps."""
        return len({*self.active}) <= 1 and not any(self.resting)


def padded_batches(work: Sequence[Sequence[Assignment]]) -> tuple[Named, Schedule]:
    """The batches of all clients as (trials, clients, rows of all steps), and their schedule."""
    shape = (len(work), len(work[0]))
    alike = _alike(work)
    everyone = [] if alike else [each for trial in work for each in trial]
    first = alike[0].sizes if alike else everyone[0].sizes
    if alike or all(each.sizes == first for each in everyone):
        found = _stacked(alike) if alike else _side_by_side(everyone, shape)
        steps = len(first)
        found["steps"] = torch.full(shape, steps)
        return found, Schedule(first, (shape[1],) * steps, (False,) * steps)
    steps_of = torch.tensor([[len(each.sizes) for each in trial] for trial in work])
    numbers = range(int(steps_of.max()))
    widths = tuple(max(e.sizes[i] for e in everyone if i < len(e.sizes)) for i in numbers)
    at_work = [(steps_of > i).sum(dim=1) for i in numbers]
    schedule = Schedule(
        widths,
        tuple(int(counts.max()) for counts in at_work),
        tuple(bool((counts < counts.max()).any()) for counts in at_work),
    )
    found = _side_by_side([_padded(each, widths) for each in everyone], shape)
    shares = [_line([_equal_shares(size) for size in e.sizes], widths) for e in everyone]
    found["weights"] = torch.stack(shares).reshape(*shape, -1)
    found["steps"] = steps_of
    return found, schedule


def _alike(work: Sequence[Sequence[Assignment]]) -> list[Alike]:
    """All of it, where it lies side by side already; otherwise nothing."""
    found = [trial for trial in work if isinstance(trial, Alike)]
    forms = {(trial.sizes, trial.rows.shape) for trial in found}
    return found if len(found) == len(work) and len(forms) == 1 else []


def _stacked(alike: Sequence[Alike]) -> Named:
    found = {
        "rows": torch.stack([trial.order for trial in alike]),
        "key": torch.stack([trial.keys for trial in alike]),
    }
    if alike[0].draws is not None:
        found["draws"] = torch.stack([t.draws for t in alike if t.draws is not None])
    return found


def _side_by_side(everyone: Sequence[Assignment], shape: tuple[int, int]) -> Named:
    found = {
        "rows": torch.stack([each.order for each in everyone]),
        "key": torch.stack([each.keys for each in everyone]),
    }
    if everyone[0].draws is not None:
        found["draws"] = torch.stack([e.draws for e in everyone if e.draws is not None])
    return {name: t.reshape(*shape, *t.shape[1:]) for name, t in found.items()}


def _padded(each: Assignment, widths: Sequence[int]) -> Assignment:
    """The same with every step at its place among steps of these widths."""
    sizes = list(each.sizes)
    draws = each.draws
    return replace(
        each,
        order=_line(torch.split(each.order, sizes), widths),
        draws=None if draws is None else _line(torch.split(draws, sizes), widths),
        keys=_line([each.keys], [len(widths)]),
    )


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
    if alike := _alike(work):
        return {"rows": torch.stack([trial.rows for trial in alike])}
    rows = [each.rows for trial in work for each in trial]
    shape = (len(work), len(work[0]))
    most = max(len(r) for r in rows)
    if all(len(r) == most for r in rows):
        return {"rows": torch.stack(rows).reshape(*shape, most)}
    found = {"rows": torch.stack([_line([r], [most]) for r in rows]).reshape(*shape, most)}
    if any(len(r) < most for r in rows):
        shares = [_line([_equal_shares(len(r))], [most]) for r in rows]
        found["weights"] = torch.stack(shares).reshape(*shape, most)
    return found


def _equal_shares(count: int) -> Tensor:
    return torch.full((count,), 1 / count, dtype=torch.float64)
