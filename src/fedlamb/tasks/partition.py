"""Who holds what: the training rows dealt to the clients, each row exactly once."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import SettingError, whole_number


def iid(samples: int, n: int, seed: int = 0) -> list[Tensor]:
    """Rows 0 … samples - 1 in random order, in n parts whose sizes differ by at most one."""
    _check_counts(samples, n, 1)
    order = np.random.default_rng(seed).permutation(samples)
    return [torch.from_numpy(np.sort(part)) for part in np.array_split(order, n)]


def shards(labels: Any, n: int, per_client: int = 2, seed: int = 0) -> list[Tensor]:
    """Label-sorted shards: the rows sorted by label, cut into n * per_client equal pieces (to
    within one row), and `per_client` pieces dealt at random to each of the n clients."""
    labels = torch.as_tensor(labels).cpu().numpy()
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise SettingError(
            "labels", f"{labels.dtype} {labels.shape}", "must be one whole number for each row"
        )
    _check_counts(len(labels), n, per_client)
    draw = np.random.default_rng(seed)
    shuffled = draw.permutation(len(labels))  # which rows of a class share a shard is random too
    by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
    pieces = np.array_split(by_label, n * per_client)
    dealt = draw.permutation(n * per_client).reshape(n, per_client)
    return [torch.from_numpy(np.sort(np.concatenate([pieces[i] for i in row]))) for row in dealt]


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
