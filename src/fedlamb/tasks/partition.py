"""Who holds what: the training rows dealt to the clients, each row exactly once.

Every split is a function of its arguments and a seed alone, and takes O(samples log samples).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import SettingError, is_whole, whole_number

Counts = NDArray[np.int64]


class Rows(Sequence[Tensor]):
    """The rows of each client, as a list of tensors would hold them, in two tensors: a million
    clients take no more memory than their rows."""

    def __init__(self, flat: Tensor, sizes: Tensor) -> None:
        self.flat, self.sizes = flat, sizes
        self._ends = sizes.cumsum(0).tolist()

    @staticmethod
    def of(parts: Sequence[NDArray[np.int64]]) -> "Rows":
        """Each client's rows in ascending order."""
        sizes = np.array([len(part) for part in parts], dtype=np.int64)
        return Rows.cut(np.concatenate(parts), sizes)

    @staticmethod
    def cut(flat: NDArray[np.int64], sizes: NDArray[np.int64]) -> "Rows":
        """All rows one client after another, in ascending order for each."""
        owner = np.repeat(np.arange(len(sizes)), sizes)
        ordered = np.ascontiguousarray(flat[np.lexsort((flat, owner))])
        return Rows(torch.from_numpy(ordered), torch.from_numpy(sizes))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, client: Any) -> Any:
        if isinstance(client, slice):
            return [self[i] for i in range(*client.indices(len(self)))]
        end = self._ends[client]
        start = self._ends[client - 1] if client % len(self) else 0
        return self.flat[start:end]


def iid(samples: int, n: int, seed: int = 0) -> Rows:
    """Rows 0 … samples - 1 in random order, in n parts whose sizes differ by at most one."""
    _check_counts(samples, n, 1)
    order = _generator(seed).permutation(samples)
    return Rows.cut(order, _even(samples, n))


def shards(labels: Any, n: int, per_client: int = 2, seed: int = 0) -> Rows:
    """Label-sorted shards: the rows sorted by label, cut into n * per_client equal pieces (to
    within one row), and `per_client` pieces dealt at random to each of the n clients."""
    labels = _labels(labels)
    _check_counts(len(labels), n, per_client)
    draw = _generator(seed)
    pieces = np.array_split(_by_label(labels, draw), n * per_client)
    dealt = draw.permutation(n * per_client).reshape(n, per_client)
    return Rows.of([np.concatenate([pieces[i] for i in row]) for row in dealt])


def classes(labels: Any, n: int, per_client: int = 2, seed: int = 0) -> Rows:
    """Exactly `per_client` classes for each client; the rows of a class go in equal parts to the
    clients that hold it, and every class goes to as many clients as any other, to within one."""
    labels = _labels(labels)
    _check_counts(len(labels), n, per_client)
    draw = _generator(seed)
    names, sizes = np.unique(labels, return_counts=True)
    if per_client > len(names):
        raise SettingError("per_client", per_client, f"must be at most {len(names)}, the classes")
    if n * per_client < len(names):
        raise SettingError(
            "n", n, f"with {per_client} classes each leaves some of {len(names)} classes to nobody"
        )
    # Along one cyclic order of the classes, any `per_client` in a row are different ones.
    cycle = draw.permutation(len(names))
    slots = np.resize(cycle, n * per_client)
    holders = draw.permutation(np.repeat(np.arange(n), per_client).reshape(n, per_client)).ravel()
    parts: list[list[NDArray[np.int64]]] = [[] for _ in range(n)]
    starts = np.cumsum(sizes) - sizes
    rows = _by_label(labels, draw)
    for c, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        clients = holders[slots == c]
        if size < len(clients):
            raise SettingError(
                "n", n, f"gives class {names[c]} to {len(clients)} clients, but it has {size} rows"
            )
        of_class = np.array_split(rows[start : start + size], len(clients))
        for client, part in zip(clients, of_class, strict=True):
            parts[client].append(part)
    return Rows.of([np.concatenate(part) for part in parts])


def dirichlet(labels: Any, n: int, alpha: float, balanced: bool = True, seed: int = 0) -> Rows:
    """Label shares drawn from Dirichlet(alpha): the smaller alpha, the fewer classes a client has.

    Balanced, the sizes differ by at most one and a client's shares are its draw, bent as little
    as it takes to use every row once. Otherwise each class is dealt by a draw over the clients,
    and sizes differ as they fall. No client is ever empty.
    """
    labels = _labels(labels)
    _check_counts(len(labels), n, 1)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < np.inf:
        raise SettingError("alpha", alpha, "must be a positive number, for example 0.5")
    draw = _generator(seed)
    _, sizes = np.unique(labels, return_counts=True)
    if balanced:
        shares = draw.dirichlet(np.full(len(sizes), float(alpha)), size=n)
        counts = _with_sums(shares, _even(len(labels), n), sizes)
    else:
        # Gamma draws make a Dirichlet draw that cannot come out as 0 / 0 for a tiny alpha.
        shares = draw.standard_gamma(float(alpha), size=(n, len(sizes))) + 1e-300
        counts = _rounded(shares / shares.sum(axis=0) * sizes, sizes)
    rows = _deal(counts, _by_label(labels, draw), sizes, n)
    return Rows.of(_none_empty(rows, draw))


def by_value(values: Any) -> Rows:
    """One client for each value of a column, such as the writer of a digit, in order of value."""
    values = np.asarray(values)
    if values.ndim != 1 or len(values) == 0:
        raise SettingError("values", f"{values.dtype} {values.shape}", "must be one for each row")
    _, codes = np.unique(values, return_inverse=True)
    order = np.argsort(codes, kind="stable")
    return Rows.of(np.split(order, np.cumsum(np.bincount(codes))[:-1]))


def read_rows(path: Path, samples: int, kept: Tensor | None = None) -> Rows:
    """The split in a JSON file: a list with the rows, 0 … samples - 1, of each client.

    `kept` are the rows that a validation share left; the others go out of every client's list,
    and rows are counted among those left.
    """
    try:
        lists = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingError("file", str(path), f"cannot be read; {error}") from error
    position = torch.arange(samples)
    if kept is not None:
        position = torch.full((samples,), -1)
        position[kept] = torch.arange(len(kept))
    if not isinstance(lists, list) or not lists:
        raise SettingError("file", str(path), "must hold a list with the rows of each client")
    found = []
    for client, rows in enumerate(lists):
        whole = isinstance(rows, list) and all(is_whole(row) for row in rows)
        if not whole or not rows or min(rows) < 0 or max(rows) >= samples:
            raise SettingError(
                "file",
                f"{path}, client {client}",
                f"must hold a list of row numbers from 0 to {samples - 1}",
            )
        left = position[torch.tensor(rows, dtype=torch.int64)]
        found.append(left[left >= 0].numpy())
    return Rows.of(found)


def from_flower(partitioner: Any, columns: Mapping[str, Any]) -> Rows:
    """The split of a `flwr_datasets` partitioner over these columns, such as {"label": labels}."""
    try:
        from datasets import Dataset
    except ImportError as error:
        raise SettingError(
            "partitioner", type(partitioner).__name__, "needs: pip install 'fedlamb[data]'"
        ) from error
    table = {name: np.asarray(values) for name, values in columns.items()}
    samples = len(next(iter(table.values())))
    partitioner.dataset = Dataset.from_dict({**table, "fedlamb row": np.arange(samples)})
    parts = (partitioner.load_partition(i) for i in range(partitioner.num_partitions))
    return Rows.of([np.asarray(part["fedlamb row"], dtype=np.int64) for part in parts])


@dataclass(frozen=True)
class PerRound:
    """The whole training set dealt anew to the active clients in each round.

    `deal(k, seed)` splits it into k parts, for example `lambda k, seed: iid(60000, k, seed)`; `n`
    is the number of clients, of which `fit`'s fraction is active.
    """

    deal: Callable[[int, int], Rows]
    n: int

    def __post_init__(self) -> None:
        if type(self.n) is not int or self.n < 1:
            raise SettingError("n", self.n, "must be a whole number from 1 on")


def hold_out(samples: int, share: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(rows that stay, rows set aside): a random share of the rows for validation."""
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
        raise SettingError("share", share, "must lie between 0 and 1, for example 0.1")
    aside = round(samples * share)
    if not 0 < aside < samples:
        raise SettingError("share", share, f"leaves nothing on one side of {samples} samples")
    # A stream of its own, so that a split under the same seed does not follow the same order.
    order = np.random.default_rng([seed, 1]).permutation(samples)
    kept, held = np.sort(order[aside:]), np.sort(order[:aside])
    return torch.from_numpy(kept), torch.from_numpy(held)


def _even(samples: int, n: int) -> Counts:
    """n sizes that differ by at most one."""
    sizes = np.full(n, samples // n, dtype=np.int64)
    sizes[: samples % n] += 1
    return sizes


def _labels(labels: Any) -> NDArray[np.int64]:
    try:
        found = torch.as_tensor(labels).cpu().numpy()
    except (TypeError, ValueError) as error:
        raise SettingError(
            "labels", type(labels).__name__, f"must be one whole number for each row; {error}"
        ) from error
    if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
        raise SettingError(
            "labels", f"{found.dtype} {found.shape}", "must be one whole number for each row"
        )
    return found.astype(np.int64, copy=False)


def _by_label(labels: NDArray[np.int64], draw: np.random.Generator) -> NDArray[np.int64]:
    """The rows sorted by label, in random order within a label."""
    shuffled = draw.permutation(len(labels))
    return shuffled[np.argsort(labels[shuffled], kind="stable")]


def _with_sums(shares: NDArray[np.float64], rows: Counts, columns: Counts) -> Counts:
    """Whole numbers near the shares with exactly these sums of rows and columns."""
    expected = shares * rows[:, None] + 1e-9
    for _ in range(50):  # iterative proportional fitting
        expected *= columns / expected.sum(axis=0)
        expected *= (rows / expected.sum(axis=1))[:, None]
    counts = _rounded(expected * (columns / expected.sum(axis=0)), columns)
    # Rounding left some rows a little long and others short: what the long ones have too much
    # of, from their largest entries, goes to the short ones.
    spare = counts.sum(axis=1) - rows
    given = np.zeros_like(columns)
    for i in np.flatnonzero(spare > 0):
        while spare[i] > 0:
            c = int(counts[i].argmax())
            move = min(int(spare[i]), max(1, int(counts[i, c]) // 2))
            counts[i, c] -= move
            given[c] += move
            spare[i] -= move
    pool = np.repeat(np.arange(len(columns)), given)
    takers = np.repeat(np.arange(len(rows)), np.maximum(-spare, 0))
    np.add.at(counts, (takers, pool), 1)
    return counts


def _rounded(expected: NDArray[np.float64], columns: Counts) -> Counts:
    """Each column rounded to whole numbers with its exact sum, by its running total."""
    totals = np.rint(np.cumsum(expected, axis=0)).astype(np.int64)
    totals[-1] = columns
    return np.diff(np.minimum(totals, columns), axis=0, prepend=0)


def _deal(
    counts: Counts, rows: NDArray[np.int64], sizes: Counts, n: int
) -> list[NDArray[np.int64]]:
    """The rows, sorted by label, dealt to n clients by counts[client, label]."""
    client = np.concatenate([np.repeat(np.arange(n), counts[:, c]) for c in range(len(sizes))])
    order = np.argsort(client, kind="stable")
    return np.split(rows[order], np.cumsum(counts.sum(axis=1))[:-1])


def _none_empty(
    parts: list[NDArray[np.int64]], draw: np.random.Generator
) -> list[NDArray[np.int64]]:
    """Every empty part takes one row from what was then the largest."""
    sizes = np.array([len(part) for part in parts])
    for i in np.flatnonzero(sizes == 0):
        largest = int(sizes.argmax())
        taken = int(draw.integers(sizes[largest]))
        parts[i] = parts[largest][taken : taken + 1]
        parts[largest] = np.delete(parts[largest], taken)
        sizes[largest], sizes[i] = sizes[largest] - 1, 1
    return parts


def _generator(seed: int) -> np.random.Generator:
    if not is_whole(seed) or seed < 0:
        raise SettingError("seed", seed, "must be a whole number from 0 on")
    return np.random.default_rng(seed)


def _check_counts(samples: int, n: int, per_client: int) -> None:
    for name, value in (("samples", samples), ("n", n), ("per_client", per_client)):
        whole_number(name, value, 1)
    if n * per_client > samples:
        raise SettingError(
            "n",
            n,
            f"needs {n * per_client} samples at least ({per_client} for each client), "
            f"and there are {samples}; use at most {samples // per_client} clients",
        )
