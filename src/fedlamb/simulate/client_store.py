"""What clients keep between rounds: in memory, and past a limit on disk.

Only clients that ever took part have an entry.
"""

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..wire import pack, unpack
from .nested import Structure, tree_flatten, tree_unflatten


class Stacked(Mapping[int, Any]):
    """States of clients side by side; a state becomes a tree of its own when it is asked for."""

    def __init__(self, clients: Sequence[int], leaves: list[Tensor], structure: Structure) -> None:
        self.clients, self.leaves = [*clients], leaves
        self._places = {client: i for i, client in enumerate(clients)}
        self._structure = structure
        self._trees: dict[int, Any] = {}

    def __getitem__(self, client: int) -> Any:
        if client not in self._trees:
            place = self._places[client]
            own = [leaf[place] for leaf in self.leaves]
            self._trees[client] = tree_unflatten(own, self._structure)
        return self._trees[client]

    def __contains__(self, client: object) -> bool:
        return client in self._places

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class ClientStore:
    """Client number -> its state, and the versions of kept trees that it holds.

    `limit` is the most bytes of states in memory, by default a quarter of the machine's; those of
    clients that took part longest ago go to a temporary folder.
    """

    def __init__(self, init: Callable[[], Any], limit: int | None = None) -> None:
        self._init = init
        self.limit = _quarter_of_memory() if limit is None else limit
        self._older: dict[int, Any] = {}
        """Those in memory, the one that took part longest ago first."""
        self._latest: Mapping[int, Any] = {}
        """Those in memory that took part last, where they are still side by side."""
        self.guests: dict[int, Any] = {}
        """States of clients of other processes, for one round."""
        self._upcoming: Mapping[int, Any] = {}
        self.held: dict[int, dict[str, int]] = {}
        self._spilled: dict[int, Path] = {}
        self._folder: Path | None = None

    def __len__(self) -> int:
        return len(self._older) + len(self._latest) + len(self._spilled)

    @property
    def states(self) -> dict[int, Any]:
        """Those in memory."""
        return {**self._older, **self._latest}

    @cached_property
    def structure(self) -> Structure:
        """Of every state."""
        return tree_flatten(self._init())[1]

    def fresh(self) -> Any:
        """The state of a client that has never taken part."""
        return self._init()

    def state(self, client: int) -> Any:
        """The client's state from the last round it took part in, or a fresh one."""
        if client in self.guests:
            return self.guests[client]
        for some in (self._upcoming, self._latest, self._older):
            if client in some:
                return some[client]
        fresh = self._init()
        if client in self._spilled:
            found = load_file(self._spilled[client])
            return unpack({n: t.clone() for n, t in found.items()}, like=fresh)  # see checkpoint.py
        return fresh

    def all(self) -> dict[int, Any]:
        """Every client's state."""
        return {**{client: self.state(client) for client in self._spilled}, **self.states}

    def stacked(self, clients: Sequence[int]) -> list[Tensor]:
        """The tensors of these clients' states, each with one more axis in front."""
        latest = self._upcoming or self._latest
        if isinstance(latest, Stacked) and latest.clients == [*clients] and not self.guests:
            return latest.leaves
        found = [tree_flatten(self.state(client))[0] for client in clients]
        return [torch.stack(leaves) for leaves in zip(*found, strict=True)]

    def unstacked(self, clients: Sequence[int], leaves: list[Tensor]) -> Mapping[int, Any]:
        """States for these clients, out of tensors with one more axis in front, which nobody may
        write on from then on."""
        if self._may_stay(clients, leaves):
            return Stacked(clients, leaves, self.structure)
        # In one call, whatever the number of clients.
        own = [torch._foreach_mul(leaf.unbind(), 1) for leaf in leaves]
        return {
            client: tree_unflatten([leaf[i] for leaf in own], self.structure)
            for i, client in enumerate(clients)
        }

    def _may_stay(self, clients: Sequence[int], leaves: Sequence[Tensor]) -> bool:
        """Whether these states may stay side by side: where they are all there are, since each
        keeps all of that memory alive, also when others have left it or gone to disk."""
        size = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
        alone = size == sum(leaf.untyped_storage().nbytes() for leaf in leaves)
        return alone and size <= self.limit and self._replaced_by({*clients})

    def _replaced_by(self, clients: set[int]) -> bool:
        return {*self._latest, *self._older, *self._spilled, *self._upcoming} == clients

    def versions(self, client: int) -> Mapping[str, int]:
        """Broadcast field -> version held; a field not named is at version 0."""
        return self.held.get(client, {})

    @contextmanager
    def ahead(self, states: Mapping[int, Any]) -> Iterator[None]:
        """As if these states were committed already."""
        self._upcoming = states
        try:
            yield
        finally:
            self._upcoming = {}

    def commit(
        self, states: Mapping[int, Any], cohort: Sequence[int], held: Mapping[str, int]
    ) -> None:
        """Takes over a finished round: new states, and what its broadcast left with the cohort."""
        if isinstance(states, Stacked) and self._replaced_by({*states}):
            self._older, self._latest = {}, states
        else:
            self._older |= self._latest
            self._latest = {}
            for client in states:
                self._older.pop(client, None)
            self._older |= states
        for client in states if self._spilled else ():
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
        self._older, self._latest, self.held = dict(states), {}, dict(held)
        self._spill()

    def _spill(self) -> None:
        if not self._older:
            return
        leaves = tree_flatten(next(iter(self._older.values())))[0]
        each = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
        while each and len(self._older) > max(1, self.limit // each):
            client = next(iter(self._older))
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="fedlamb-clients-"))
                weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
            path = self._folder / f"{client}.safetensors"
            save_file({n: t.contiguous() for n, t in pack(self._older[client]).items()}, path)
            self._spilled[client] = path
            del self._older[client]


def _quarter_of_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    except (ValueError, OSError, AttributeError):  # not told on this system
        return 2 * 2**30
