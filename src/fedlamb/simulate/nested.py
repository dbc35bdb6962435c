"""Nested tuples, lists and dictionaries taken apart into their leaves and put together again.

As `torch.utils._pytree`, but for the few kinds that states and messages are made of, and faster: a
GPU goes through a round of a small model as fast as Python asks for it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple


class Node(NamedTuple):
    """A tuple, list or dictionary without its leaves."""

    kind: type
    names: tuple[Any, ...] | None
    """The keys of a dictionary."""
    parts: tuple["Node | None", ...]


Structure = Node | None
"""What a tree is beside its leaves, equal and hashable; None: a leaf."""


def tree_flatten(tree: Any) -> tuple[list[Any], Structure]:
    """The leaves from left to right, and what they hang on."""
    leaves: list[Any] = []
    return leaves, _taken(tree, leaves)


def tree_leaves(tree: Any) -> list[Any]:
    """The leaves from left to right."""
    return tree_flatten(tree)[0]


def leaf_count(structure: Structure) -> int:
    """How many leaves a tree of this structure has."""
    return 1 if structure is None else sum(map(leaf_count, structure.parts))


def tree_unflatten(leaves: Sequence[Any], structure: Structure) -> Any:
    """The tree of this structure with these leaves."""
    rest = iter(leaves)
    try:
        tree = _built(structure, rest)
    except StopIteration:
        raise ValueError(f"{len(leaves)} leaves are too few for this tree") from None
    if next(rest, _NOTHING) is not _NOTHING:
        raise ValueError(f"{len(leaves)} leaves are too many for this tree")
    return tree


def tree_map(f: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """`f` on the leaves at each place; all trees have the structure of the first."""
    if isinstance(tree, dict):
        return {name: tree_map(f, part, *(o[name] for o in others)) for name, part in tree.items()}
    if isinstance(tree, (tuple, list)):
        parts = zip(tree, *others, strict=True)
        return _of_kind(type(tree), [tree_map(f, *each) for each in parts])
    return f(tree, *others)


def _taken(tree: Any, leaves: list[Any]) -> Structure:
    if isinstance(tree, dict):
        parts = tuple([_taken(part, leaves) for part in tree.values()])
        return Node(dict, tuple(tree), parts)
    if isinstance(tree, (tuple, list)):
        return Node(type(tree), None, tuple([_taken(part, leaves) for part in tree]))
    leaves.append(tree)
    return None


def _built(structure: Structure, rest: Iterator[Any]) -> Any:
    if structure is None:
        return next(rest)
    kind, names, parts = structure
    found = [_built(part, rest) if part else next(rest) for part in parts]
    return _of_kind(kind, found) if names is None else dict(zip(names, found, strict=True))


def _of_kind(kind: Any, parts: list[Any]) -> Any:
    return kind(*parts) if hasattr(kind, "_fields") else kind(parts)


_NOTHING = object()
