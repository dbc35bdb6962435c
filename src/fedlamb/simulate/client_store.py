"""What clients keep between rounds; only those that ever took part have an entry."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten


class ClientStore:
    """Client number -> its state, and the versions of kept trees that it holds."""

    def __init__(self, init: Callable[[], Any]) -> None:
        self._init = init
        self.states: dict[int, Any] = {}
        self.held: dict[int, dict[str, int]] = {}

    def state(self, client: int) -> Any:
        """The client's state from the last round it took part in, or a fresh one."""
        return self.states[client] if client in self.states else self._init()

    def stacked(self, clients: Sequence[int]) -> list[Tensor]:
        """The tensors of these clients' states, each with one more axis in front."""
        fresh: Any = None
        found = []
        for client in clients:
            state = self.states.get(client)
            if state is None:
                state = fresh = fresh if fresh is not None else self._init()
            found.append(tree_flatten(state)[0])
        return [torch.stack(leaves) for leaves in zip(*found, strict=True)]

    def unstacked(self, clients: Sequence[int], leaves: Sequence[Tensor]) -> dict[int, Any]:
        """States of their own for these clients, out of tensors with one more axis in front."""
        _, structure = tree_flatten(self._init())
        # In one call, whatever the number of clients; views would keep the whole stack alive.
        own = [torch._foreach_mul(leaf.unbind(), 1) for leaf in leaves]
        return {
            client: tree_unflatten([leaf[i] for leaf in own], structure)
            for i, client in enumerate(clients)
        }

    def versions(self, client: int) -> Mapping[str, int]:
        """Broadcast field -> version held; a field not named is at version 0."""
        return self.held.get(client, {})

    def fresh(self) -> Any:
        """The state of a client that has never taken part."""
        return self._init()

    def commit(
        self, states: Mapping[int, Any], cohort: Sequence[int], held: Mapping[str, int]
    ) -> None:
        """Takes over a finished round: new states, and what its broadcast left with the cohort."""
        self.states.update(states)
        if held:
            self.held.update({client: dict(held) for client in cohort})

    def replace(self, states: Mapping[int, Any], held: Mapping[int, dict[str, int]]) -> None:
        """Forgets everything and takes these instead."""
        self.states, self.held = dict(states), dict(held)
