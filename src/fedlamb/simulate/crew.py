"""The processes that share a run: each has a rank, its own clients and a part of the test set.

Started by torchrun, or by `fedlamb run --workers K`. Messages are plain tensors.
"""

import atexit
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..trees import Tree
from .nested import tree_flatten, tree_unflatten

_PATIENCE = timedelta(minutes=30)  # a round may be long; a rank that dies is noticed at once
_groups: list[dist.ProcessGroup] = []  # the one that messages go through, held here alone


class CrewError(RuntimeError):
    """Another process of the crew has ended or cannot be reached."""


class Crew:
    """This process among the others; alone where it has none."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    @staticmethod
    def join(device: torch.device) -> "Crew":
        """The crew that this process was started for, by its environment."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return Crew()
        try:
            if not dist.is_initialized():
                backend = "nccl" if device.type == "cuda" else "gloo"
                dist.init_process_group(backend, timeout=_PATIENCE, **_meeting(size))
                _groups.clear()
            if not _groups:
                _groups.append(dist.new_group(timeout=_PATIENCE))
                atexit.register(leave)
        except Exception as error:
            raise CrewError(f"the {size} workers did not find each other; {error}") from error
        return Crew(dist.get_rank(), size)

    @property
    def leads(self) -> bool:
        """Whether this process writes and speaks for all."""
        return self.rank == 0

    def owner(self, client: int) -> int:
        """The process that keeps the client's state."""
        return client % self.size

    def owns(self, client: int) -> bool:
        """Whether that is this one."""
        return self.owner(client) == self.rank

    def mean(self, part: Any, weight: float) -> Any:
        """The weighted mean of each process's tree of tensors."""
        if self.size == 1:
            return part
        leaves, structure = tree_flatten(part)
        like = leaves[0]
        flat = torch.cat(
            [leaf.reshape(-1) * weight for leaf in leaves] + [like.new_full((1,), weight)]
        )
        self._reduce(flat, dist.ReduceOp.SUM)
        flat = flat[:-1] / flat[-1]
        parts = torch.split(flat, [leaf.numel() for leaf in leaves])
        shaped = [p.view(leaf.shape).to(leaf.dtype) for p, leaf in zip(parts, leaves, strict=True)]
        return tree_unflatten(shaped, structure)

    def largest(self, counters: Tree) -> Tree:
        """The element-wise maximum over all processes."""
        if self.size > 1:
            for tensor in counters.values():
                self._reduce(tensor, dist.ReduceOp.MAX)
        return counters

    def total(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The sum over all processes of each named number."""
        if self.size == 1:
            return dict(values)
        flat = torch.stack(list(values.values()))
        self._reduce(flat, dist.ReduceOp.SUM)
        return dict(zip(values, flat.unbind(), strict=True))

    def agreed(self, flag: bool, device: torch.device) -> bool:
        """The leader's answer."""
        if self.size == 1:
            return flag
        said = torch.tensor([flag and self.leads], dtype=torch.int32, device=device)
        self._reduce(said, dist.ReduceOp.MAX)
        return bool(said)

    def told(self, text: str) -> str:
        """The leader's text."""
        if self.size == 1:
            return text
        device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
        data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
        length = torch.tensor([len(data)], device=device)
        self._try(dist.broadcast, length, src=0)
        if not self.leads:
            data = torch.zeros(int(length), dtype=torch.uint8, device=device)
        self._try(dist.broadcast, data, src=0)
        return bytes(data.tolist()).decode()

    def handed_over(self, state: Any, sender: int, receiver: int) -> Any:
        """The sender's state, at both; what the receiver gives is of the same form."""
        leaves, structure = tree_flatten(state)
        if self.rank == sender:
            for leaf in leaves:
                self._try(dist.send, leaf.contiguous(), dst=receiver)
            return state
        found = [torch.empty_like(leaf, memory_format=torch.contiguous_format) for leaf in leaves]
        for leaf in found:
            self._try(dist.recv, leaf, src=sender)
        return tree_unflatten(found, structure)

    def gathered(
        self, states: Mapping[int, Any], like: Any, device: torch.device
    ) -> dict[int, Any]:
        """At the leader: the states of all processes' clients; elsewhere: nothing."""
        if self.size == 1:
            return dict(states)
        leaves, structure = tree_flatten(like)
        if not leaves:
            return self._gathered_numbers(states, like, device)
        found: dict[int, Any] = dict(states)
        for rank in range(1, self.size):
            if self.leads:
                numbers = self._receive_numbers(rank, device)
                for client in numbers:
                    own = [torch.empty_like(leaf) for leaf in leaves]
                    for tensor in own:
                        self._try(dist.recv, tensor, src=rank)
                    found[client] = tree_unflatten(own, structure)
            elif rank == self.rank:
                self._send_numbers(list(states), device)
                for state in states.values():
                    for tensor in tree_flatten(state)[0]:
                        self._try(dist.send, tensor.contiguous(), dst=0)
        return found if self.leads else {}

    def _gathered_numbers(
        self, states: Mapping[int, Any], like: Any, device: torch.device
    ) -> dict[int, Any]:
        if not self.leads:
            self._send_numbers(list(states), device)
            return {}
        found = dict(states)
        for rank in range(1, self.size):
            found |= dict.fromkeys(self._receive_numbers(rank, device), like)
        return found

    def _send_numbers(self, numbers: Sequence[int], device: torch.device) -> None:
        self._try(dist.send, torch.tensor([len(numbers)], device=device), dst=0)
        if numbers:
            self._try(dist.send, torch.tensor(numbers, device=device), dst=0)

    def _receive_numbers(self, rank: int, device: torch.device) -> list[int]:
        count = torch.zeros(1, dtype=torch.int64, device=device)
        self._try(dist.recv, count, src=rank)
        numbers = torch.zeros(int(count), dtype=torch.int64, device=device)
        if len(numbers):
            self._try(dist.recv, numbers, src=rank)
        return [int(n) for n in numbers]

    def _reduce(self, tensor: Tensor, how: Any) -> None:
        self._try(dist.all_reduce, tensor, op=how)

    def _try(self, action: Any, *arguments: Any, **options: Any) -> None:
        try:
            action(*arguments, group=_groups[0], **options)
        except RuntimeError as error:
            raise CrewError("another worker of this run has ended or cannot be reached") from error


def leave() -> None:
    """Ends the group's threads while Python still runs.

    A thread of gloo that lets go of a tensor needs Python's lock, and aborts the process where
    Python has ended. A group ends with its last reference; modules of torch may hold one to the
    default group, hence a group of our own.
    """
    if dist.is_initialized():
        if _groups:
            dist.destroy_process_group(_groups.pop())
        dist.destroy_process_group()


def _meeting(size: int) -> dict[str, Any]:
    """Where the processes meet; torchrun sees to that itself."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return {}
    rank = int(os.environ["RANK"])
    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        size,
        is_master=rank == 0,
        timeout=timedelta(seconds=120),
    )
    return {"store": store, "rank": rank, "world_size": size}
