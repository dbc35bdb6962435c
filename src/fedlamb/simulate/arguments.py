"""What `fit` is given, checked: each error names the setting, the value, and what is right."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import SettingError
from ..plan import Plan
from ..randomness import own_random_state
from ..tasks.partition import Rows
from ..tasks.task import Task

_FUNCTIONS = (
    "server_init", "broadcast", "client_init", "client_begin", "client_step", "client_end",
    "server_update",
)  # fmt: skip


def check_algorithm(algorithm: Any) -> None:
    """Whether it has all that an algorithm has."""
    missing = [name for name in _FUNCTIONS if not callable(getattr(algorithm, name, None))]
    if isinstance(algorithm, type) or len(missing) == len(_FUNCTIONS):
        right = "must be an algorithm such as fedlamb.FedLAMB(lr=0.01)"
        raise SettingError("algorithm", algorithm, right)
    if missing:
        right = f"lacks {', '.join(missing)}; an algorithm has {', '.join(_FUNCTIONS)}"
        raise SettingError("algorithm", type(algorithm).__name__, right)


def check_smallest_batch(task: Task, plan: Plan) -> None:
    """Whether batch norm can take a batch of one, where some client has one."""
    if not any(isinstance(module, _BatchNorm) for module in task.model.modules()):
        return
    alone = [int(count) for count in np.unique(plan.counts()) if 1 in plan.sizes(int(count))]
    if not alone:
        return
    with torch.no_grad(), own_random_state(task.device):
        model = copy.deepcopy(task.model).train()
        try:
            task.outputs(model, task.train[0][:1].clone())
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                return  # the model's own, told where it happens
            right = (
                f"leaves a batch of one of a client's {alone[0]} rows, which batch norm cannot "
                "take; use another size, or a model with group norm"
            )
            raise SettingError("batch_size", plan.batch_size, right) from error


def client_rows(clients: Sequence[Any], task: Task) -> Rows:
    """The rows of each client as whole numbers."""
    if isinstance(clients, Rows):
        found = clients
    elif isinstance(clients, str | Mapping) or not isinstance(clients, Iterable):
        raise SettingError("clients", clients, "must be a list with the rows of each client")
    else:
        parts = [_row_numbers(client, given) for client, given in enumerate(clients)]
        if not parts:
            raise SettingError("clients", [], "must be a list with the rows of each client")
        found = Rows(torch.cat(parts), torch.tensor([len(part) for part in parts]))
    if int(found.sizes.min()) == 0:
        client = int(found.sizes.argmin())
        raise SettingError(f"clients[{client}]", [], "must hold at least one row")
    count = len(task.train[0])
    bad = (found.flat < 0) | (found.flat >= count)
    if bad.any():
        client = int(torch.searchsorted(found.sizes.cumsum(0), bad.nonzero()[0, 0], right=True))
        rows = found[client]
        raise SettingError(
            f"clients[{client}]",
            f"rows from {int(rows.min())} to {int(rows.max())}",
            f"must lie from 0 to {count - 1}, since there are {count} training examples",
        )
    return found


def _row_numbers(client: int, given: Any) -> Tensor:
    right = "must be a list of row numbers"
    try:
        rows = torch.as_tensor(sorted(given) if isinstance(given, set) else given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise SettingError(f"clients[{client}]", given, right) from error
    if rows.numel() == 0:
        raise SettingError(f"clients[{client}]", [], "must hold at least one row")
    if rows.dim() != 1 or rows.is_floating_point() or rows.dtype == torch.bool:
        raise SettingError(f"clients[{client}]", given, right)
    return rows.to(device="cpu", dtype=torch.int64)
