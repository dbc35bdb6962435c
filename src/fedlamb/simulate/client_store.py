"""What clients keep between rounds; only those that ever took part have an entry."""

from collections.abc import Callable, Mapping
from typing import Any


class ClientStore:
    """Client number -> its state, and the versions of kept trees that it holds."""

    def __init__(self, init: Callable[[], Any]) -> None:
        self._init = init
        self.states: dict[int, Any] = {}
        self.held: dict[int, dict[str, int]] = {}

    def state(self, client: int) -> Any:
        """The client's state from the last round it took part in, or a fresh one."""
        return self.states[client] if client in self.states else self._init()

    def versions(self, client: int) -> Mapping[str, int]:
        """Broadcast field -> version held; a field not named is at version 0."""
        return self.held.get(client, {})

    def commit(self, states: Mapping[int, Any], held: Mapping[str, int]) -> None:
        """Takes over a finished round: new states, and what its broadcast left with them."""
        self.states.update(states)
        if held:
            self.held.update({client: dict(held) for client in states})

    def replace(self, states: Mapping[int, Any], held: Mapping[int, dict[str, int]]) -> None:
        """Forgets everything and takes these instead."""
        self.states, self.held = dict(states), dict(held)
