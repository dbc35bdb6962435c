"""Cohorts and batches: a pure function of (seed, round, client)."""

from collections import Counter
from fractions import Fraction
from math import floor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedlamb as fl
from fedlamb.plan import Plan
from fedlamb.tasks.partition import Rows


def plan(sizes=(5, 8, 3), fraction=1.0, batch_size=4, epochs=1, seed=0) -> Plan:
    rows = torch.split(torch.arange(sum(sizes)), list(sizes))
    return Plan(list(rows), fraction, batch_size, epochs, seed)


@given(n=st.integers(1, 200), percent=st.integers(1, 100), seed=st.integers(0, 1000))
def test_cohort_has_the_stated_size_without_repeats(n, percent, seed):
    drawn = plan([1] * n, fraction=percent / 100, seed=seed).cohort(3)
    assert len(drawn) == max(1, floor(Fraction(percent, 100) * n))
    assert drawn == sorted(set(drawn))
    assert drawn[0] >= 0
    assert drawn[-1] < n


def test_cohort_size_is_the_floor_of_the_true_product():
    assert 0.29 * 100 < 29  # as floats multiply
    assert len(plan([1] * 100, fraction=0.29).cohort(1)) == 29


def test_cohorts_are_uniform():
    """Each of 10 clients in half of 2,000 rounds, within five standard deviations."""
    p = plan([1] * 10, fraction=0.5)
    counts = Counter(client for r in range(1, 2001) for client in p.cohort(r))
    assert all(abs(counts[c] - 1000) < 5 * (2000 * 0.25) ** 0.5 for c in range(10))


def test_cohorts_differ_between_rounds_and_seeds_but_not_between_calls():
    one, two = plan([1] * 50, fraction=0.5, seed=1), plan([1] * 50, fraction=0.5, seed=2)
    assert one.cohort(1) == one.cohort(1)
    assert one.cohort(1) != one.cohort(2)
    assert one.cohort(1) != two.cohort(1)


@given(
    size=st.integers(1, 30),
    batch_size=st.integers(1, 12),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_every_epoch_sees_each_row_once_and_keeps_the_partial_batch(size, batch_size, epochs, seed):
    p = plan([4, size], batch_size=batch_size, epochs=epochs, seed=seed)
    batches = p.batches(2, 1)
    steps = -(-size // batch_size)
    assert len(batches) == epochs * steps
    for epoch in range(epochs):
        seen = torch.cat(batches[epoch * steps : (epoch + 1) * steps])
        assert sorted(seen.tolist()) == p.rows(2, 1).tolist()
    assert all(len(b) == batch_size for i, b in enumerate(batches) if (i + 1) % steps)


def test_batches_depend_on_round_client_epoch_and_seed_alone():
    p = plan([40, 40], batch_size=40, epochs=2)
    here = [b.tolist() for b in p.batches(1, 0)]
    assert here == [b.tolist() for b in p.batches(1, 0)]
    assert here[0] != here[1]
    assert here != [b.tolist() for b in p.batches(2, 0)]
    assert here != [(b - 40).tolist() for b in p.batches(1, 1)]
    assert here != [
        b.tolist() for b in plan([40, 40], batch_size=40, epochs=2, seed=1).batches(1, 0)
    ]
    assert p.model_seed(1, 0) != p.model_seed(1, 1) != p.model_seed(2, 1)


@given(samples=st.integers(1, 300), n=st.integers(1, 40), seed=st.integers(0, 9))
def test_iid_is_a_partition_into_equal_parts(samples, n, seed):
    if n > samples:
        with pytest.raises(fl.SettingError, match="at most"):
            fl.iid(samples, n, seed)
        return
    parts = fl.iid(samples, n, seed)
    assert sorted(torch.cat(list(parts)).tolist()) == list(range(samples))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(
    labels=st.lists(st.integers(0, 9), min_size=40, max_size=200),
    n=st.integers(1, 10),
    per_client=st.integers(1, 4),
    seed=st.integers(0, 9),
)
def test_shards_are_a_partition_with_few_classes(labels, n, per_client, seed):
    parts = fl.shards(labels, n, per_client, seed)
    assert len(parts) == n
    assert sorted(torch.cat(list(parts)).tolist()) == list(range(len(labels)))
    assert [p.tolist() for p in parts] == [
        p.tolist() for p in fl.shards(labels, n, per_client, seed)
    ]
    # A shard of s rows spans at most as many classes as its rows can touch.
    counts = Counter(labels)
    longest = -(-len(labels) // (n * per_client))
    most = max(1, -(-longest // max(1, min(counts.values())))) + 1
    for part in parts:
        assert len({labels[i] for i in part.tolist()}) <= per_client * most


def test_shards_of_one_class_each_where_the_classes_divide():
    labels = [c for c in range(10) for _ in range(20)]
    parts = fl.shards(labels, n=10, per_client=2)
    assert all(len({labels[i] for i in part.tolist()}) <= 2 for part in parts)


def test_streams_are_what_they_were_when_results_were_published():
    p = plan([7, 9, 5, 8], fraction=0.5, batch_size=4, epochs=2, seed=6)
    for r in (1, 2):
        drawn = np.random.default_rng([6, 0, r]).choice(4, size=2, replace=False)
        assert p.cohort(r) == sorted(drawn)
        for client in p.cohort(r):
            draw, rows = np.random.default_rng([6, 1, r, client]), p.rows(r, client).numpy()
            orders = [rows[draw.permutation(len(rows))] for _ in range(2)]
            keys = draw.integers(-(2**63), 2**63 - 1, size=len(p.batches(r, client)))
            order, own = p.steps(r, client)
            assert order.tolist() == np.concatenate(orders).tolist()
            assert own.tolist() == keys.tolist()


def test_a_cohort_may_be_changed_by_whoever_asked_for_it():
    p = plan([1] * 5)
    p.cohort(1).clear()
    assert p.cohort(1) == [0, 1, 2, 3, 4]


def test_rows_are_what_a_list_of_them_would_give():
    parts = [[3, 4], [1], [0, 2, 5]]
    rows = Rows(torch.tensor([3, 4, 1, 0, 2, 5]), torch.tensor([2, 1, 3]))
    assert [part.tolist() for part in rows] == parts
    assert [rows[i].tolist() for i in (-1, -2, -3)] == parts[::-1]
    for place in (3, -4):
        with pytest.raises(IndexError):
            rows[place]
