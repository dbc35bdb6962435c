"""Which runs may go on with what another has compiled and recorded."""

from dataclasses import replace
from typing import Any

from torch import nn

from ..algorithm import AnyAlgorithm
from ..algorithms import ALGORITHMS
from ..tasks.task import Task


def same_but_start(one: Task, two: Task) -> bool:
    """Whether two tasks differ at most in what their trained parameters and buffers start from."""

    def beside(task: Task) -> Any:
        modules = [(n, type(m), _configuration(m)) for n, m in task.model.named_modules()]
        kinds = {name: (p.shape, p.dtype) for name, p in task.params.items()}
        data = [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in task.train]
        return modules, kinds, data, task.precision, task.inputs, task.loss

    def all_moves(task: Task) -> bool:  # what does not is part of a program
        whole = len([*task.model.parameters()]) + len([*task.model.buffers()])
        return whole == len(task.params) + len(task.buffers)

    try:
        return one is two or (all_moves(one) and all_moves(two) and beside(one) == beside(two))
    except (RuntimeError, ValueError):  # modules that hold tensors or arrays as plain attributes
        return False


def _configuration(module: nn.Module) -> dict[str, Any]:
    """What decides a module beside its parameters, buffers and parts; of methods, not whose."""
    apart = ("_parameters", "_buffers", "_modules", "training")
    found = {name: value for name, value in vars(module).items() if name not in apart}
    return {name: getattr(value, "__func__", value) for name, value in found.items()}


def same_programs(one: AnyAlgorithm, two: AnyAlgorithm) -> bool:
    """Whether clients do the same under both. The rates of the six methods are sent to the clients
    or are the server's, and so part of no program; one's own may be anywhere."""
    if type(one) is type(two) and type(one) in ALGORITHMS.values():
        rates = {name: getattr(two, name) for name in ("lr", "server_lr") if hasattr(one, name)}
        changed: Any = one
        return bool(replace(changed, **rates) == two)
    return one is two
