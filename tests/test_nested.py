"""Trees are taken apart as torch's own functions do it."""

from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as torchs

from fedlamb.simulate.nested import (
    leaf_count,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)


class Pair(NamedTuple):
    one: Any
    two: Any


def within(parts: Any) -> Any:
    return st.one_of(
        st.lists(parts, max_size=3),
        st.lists(parts, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abcd"), parts, max_size=3),
        st.tuples(parts, parts).map(lambda both: Pair(*both)),
    )


TREES = st.recursive(st.one_of(st.integers(), st.none(), st.text(max_size=2)), within)


@given(TREES)
def test_as_torch_does_it(tree: Any) -> None:
    leaves, structure = tree_flatten(tree)
    assert leaves == torchs.tree_flatten(tree)[0] == tree_leaves(tree)
    assert leaf_count(structure) == len(leaves)
    doubled = tree_map(lambda a, b: (a, b), tree, tree)
    assert doubled == torchs.tree_map(lambda a: (a, a), tree)
    for again in (tree_unflatten(leaves, structure), tree_map(lambda leaf: leaf, tree)):
        assert again == tree
        assert str(again) == str(tree)  # of the same kinds, in the same order


@given(TREES, TREES)
def test_structures_are_told_apart(one: Any, two: Any) -> None:
    structures = [tree_flatten(tree)[1] for tree in (one, two)]
    known = [torchs.tree_flatten(tree)[1] for tree in (one, two)]
    # torch takes dictionaries with the same keys in another order for the same.
    if structures[0] == structures[1]:
        assert known[0] == known[1]
        assert hash(structures[0]) == hash(structures[1])
    elif str(known[0]) != str(known[1]):
        assert structures[0] != structures[1]


def test_trees_with_names_in_another_order() -> None:
    assert tree_map(lambda a, b: a - b, {"x": 3, "y": 5}, {"y": 1, "x": 2}) == {"x": 1, "y": 4}


@pytest.mark.parametrize("leaves", [[1], [1, 2, 3]])
def test_a_wrong_number_of_leaves_is_refused(leaves: list[int]) -> None:
    structure = tree_flatten(Pair(0, 0))[1]
    with pytest.raises(ValueError, match=f"{len(leaves)} leaves are too"):
        tree_unflatten(leaves, structure)
