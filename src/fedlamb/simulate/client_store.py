"""What clients keep between rounds: in memory, and past a limit on disk.

Only clients that ever took part have an entry.
"""

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from operator import is_
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..wire import pack, unpack


class ClientStore:
    """Client number -> its state, and the versions of kept trees that it holds.

    `limit` is the most bytes of states in memory, by default a quarter of the machine's; those of
    clients that took part longest ago go to a temporary folder.
    """

    def __init__(self, init: Callable[[], Any], limit: int | None = None) -> None:
        self._init = init
        self.limit = _quarter_of_memory() if limit is None else limit
        self.states: dict[int, Any] = {}
        """Those in memory, the one that took part longest ago first."""
        self.guests: dict[int, Any] = {}
        """States of clients of other processes, for one round."""
        self.held: dict[int, dict[str, int]] = {}
        self._spilled: dict[int, Path] = {}
        self._folder: Path | None = None
        self._stack: _Stack | None = None
        """What the last states came from, where they are views of it."""

    def __len__(self) -> int:
        return len(self.states) + len(self._spilled)

    @cached_property
    def structure(self) -> TreeSpec:
        """Of every state."""
        return tree_flatten(self._init())[1]

    def fresh(self) -> Any:
        """The state of a client that has never taken part."""
        return self._init()

    def state(self, client: int) -> Any:
        """The client's state from the last round it took part in, or a fresh one."""
        if client in self.guests:
            return self.guests[client]
        if client in self.states:
            return self.states[client]
        fresh = self._init()
        if client in self._spilled:
            return unpack(load_file(self._spilled[client]), like=fresh)
        return fresh

    def all(self) -> dict[int, Any]:
        """Every client's state."""
        return {**{client: self.state(client) for client in self._spilled}, **self.states}

    def stacked(self, clients: Sequence[int]) -> list[Tensor]:
        """The tensors of these clients' states, each with one more axis in front."""
        states = [self.state(client) for client in clients]
        if self._stack is not None and self._stack.holds(states):
            return self._stack.leaves
        found = [tree_flatten(state)[0] for state in states]
        return [torch.stack(leaves) for leaves in zip(*found, strict=True)]

    def unstacked(self, clients: Sequence[int], leaves: list[Tensor]) -> dict[int, Any]:
        """States for these clients, out of tensors with one more axis in front, which nobody may
        write on from then on."""
        views = self._replaces_all(clients, leaves)
        # In one call, whatever the number of clients.
        own = [leaf.unbind() if views else torch._foreach_mul(leaf.unbind(), 1) for leaf in leaves]
        rows = zip(*own, strict=True) if own else [()] * len(clients)
        states = [tree_unflatten(row, self.structure) for row in rows]
        self._stack = _Stack(states, leaves) if views else None
        return dict(zip(clients, states, strict=True))

    def _replaces_all(self, clients: Sequence[int], leaves: Sequence[Tensor]) -> bool:
        """Whether no state would be left beside these: only then may they be views, since a view
        keeps all of its memory alive, also where others have left it or gone to disk."""
        size = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
        alone = size == sum(leaf.untyped_storage().nbytes() for leaf in leaves)
        fits = size <= self.limit and not self._spilled
        return alone and fits and self.states.keys() <= {*clients}

    def versions(self, client: int) -> Mapping[str, int]:
        """Broadcast field -> version held; a field not named is at version 0."""
        return self.held.get(client, {})

    def commit(
        self, states: Mapping[int, Any], cohort: Sequence[int], held: Mapping[str, int]
    ) -> None:
        """Takes over a finished round: new states, and what its broadcast left with the cohort."""
        for client, state in states.items():
            self.states.pop(client, None)
            self.states[client] = state
            old = self._spilled.pop(client, None)
            if old is not None:
                old.unlink()
        if held:
            self.held.update({client: dict(held) for client in cohort})
        self._spill()

    def replace(self, states: Mapping[int, Any], held: Mapping[int, dict[str, int]]) -> None:
        """Forgets everything and takes these instead."""
        for path in self._spilled.values():
            path.unlink()
        self._spilled = {}
        self.states, self.held = dict(states), dict(held)
        self._spill()

    def _spill(self) -> None:
        if not self.states:
            return
        leaves = tree_flatten(next(iter(self.states.values())))[0]
        each = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
        while each and len(self.states) > max(1, self.limit // each):
            client = next(iter(self.states))
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="fedlamb-clients-"))
                weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
            path = self._folder / f"{client}.safetensors"
            save_file({n: t.contiguous() for n, t in pack(self.states[client]).items()}, path)
            self._spilled[client] = path
            del self.states[client]


class _Stack(NamedTuple):
    """States side by side."""

    states: list[Any]
    leaves: list[Tensor]

    def holds(self, states: Sequence[Any]) -> bool:
        """Whether these are the states, the very same and in this order."""
        return len(states) == len(self.states) and all(map(is_, states, self.states))


def _quarter_of_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    except (ValueError, OSError, AttributeError):  # not told on this system
        return 2 * 2**30
