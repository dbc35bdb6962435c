"""Parts of a cohort side by side on streams of their own.

Compiled convolutions of small models are held up by memory or by arithmetic, never by both. Of
several parts, one multiplies while another reads: a tenth less time for the paper's CNN. Without
convolutions nothing is gained, and where nothing is compiled, torch's own products would keep
scratch memory for each stream.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.conv import _ConvNd

from ..tasks.task import Task
from .nested import tree_leaves, tree_map

_MOST = 5


class Lanes:
    """Runs a function on as many equal parts of the clients as there are lanes; one part without a
    GPU, without convolutions, or not compiled. Each lane always has the same stream, since products
    keep scratch memory for each."""

    def __init__(self, task: Task) -> None:
        self._device = task.device
        convolves = any(isinstance(layer, _ConvNd) for layer in task.model.modules())
        self._most = _MOST if convolves and task.device.type == "cuda" else 1
        self._streams: list[torch.cuda.Stream] = []

    def __call__(self, function: Callable[..., Any], *of_clients: Any) -> Any:
        """What the function gives; all tensors, given and found, have axes (trials, clients, ...),
        and those of a client depend on that client alone."""
        count = self._parts(next(iter(tree_leaves(of_clients))))
        if count == 1:
            return function(*of_clients)
        here = torch.cuda.current_stream(self._device)
        found, begun = [], []
        try:
            for number in range(count):
                stream = self._stream(number)
                stream.wait_stream(here)
                begun.append(stream)
                with torch.cuda.stream(stream):
                    found.append(function(*tree_map(partial(_part, number, count), of_clients)))
        finally:  # or else the recording of a graph that fails could not be ended
            for stream in begun:
                here.wait_stream(stream)
        return tree_map(lambda *parts: torch.cat(parts, dim=1), *found)

    def _parts(self, of_clients: Tensor) -> int:
        """Equal ones, so that all are the same program; several trials fill a GPU anyway."""
        trials, clients = of_clients.shape[:2]
        return 1 if trials > 1 else next(n for n in range(self._most, 0, -1) if clients % n == 0)

    def _stream(self, number: int) -> torch.cuda.Stream:
        while len(self._streams) <= number:
            self._streams.append(torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]
        return self._streams[number]


def _part(number: int, count: int, tensor: Tensor) -> Tensor:
    return tensor.tensor_split(count, dim=1)[number]
