"""Keyed dropout: right shares, independent layers and keys, left alone in evaluation."""

import copy

import pytest
import torch
from torch import nn

import fedlamb as fl
from fedlamb.tasks.dropout import KeyedDropout, keyed_layers, with_keyed_dropout


def kept(p: float, key: int, shape=(1000, 50), number=0, whole_channels=False):
    layer = KeyedDropout(p, whole_channels, number)
    layer.key = torch.tensor(key)
    return layer(torch.ones(shape))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_shares_and_scale(p):
    found = kept(p, key=7)
    assert found.unique().tolist() == pytest.approx([0.0, 1 / (1 - p)])
    assert float((found == 0).double().mean()) == pytest.approx(p, abs=0.01)
    columns = (found == 0).double().mean(dim=0)
    assert float((columns - p).abs().max()) < 0.07


def test_keys_layers_and_positions_are_independent():
    one = kept(0.5, key=7)
    assert torch.equal(one, kept(0.5, key=7))
    for other in (kept(0.5, key=8), kept(0.5, key=7, number=1), kept(0.5, key=-7), one.flip(0)):
        assert float((one == other).double().mean()) == pytest.approx(0.5, abs=0.01)


def test_whole_channels_go_together():
    found = kept(0.5, key=3, shape=(200, 30, 4, 4), whole_channels=True)
    assert torch.equal(found, found[:, :, :1, :1].expand_as(found))
    assert float((found == 0).double().mean()) == pytest.approx(0.5, abs=0.03)


def test_every_dropout_of_a_model_is_replaced_and_given_back():
    with torch.random.fork_rng():
        inner = nn.Sequential(nn.Dropout(0.2), nn.Dropout1d(0.3))
        model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(), inner, nn.Dropout(), nn.Linear(6, 2))
    keyed = with_keyed_dropout(copy.deepcopy(model))
    assert list(keyed_layers(keyed)) == ["1.key", "2.0.key", "2.1.key", "3.key"]
    x, y = torch.ones(20, 6), torch.arange(20) % 2
    run = fl.fit(fl.FedSGD(lr=0.1), fl.Task(model, (x, y), (x, y)), clients=fl.iid(20, 2), rounds=1)
    next(run)
    kinds = [type(m) for m in model.modules()]
    assert [type(m) for m in run.model().modules()] == kinds
    assert KeyedDropout not in kinds


class Twice(nn.Module):
    """One layer at two places."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(6, 2), nn.Dropout(p)

    def forward(self, x):
        return self.layer(self.drop(self.drop(x)))


def test_a_layer_at_two_places_has_two_masks_the_same_everywhere():
    with torch.random.fork_rng():
        drop = nn.Dropout(0.5)
        row = nn.Sequential(nn.Linear(6, 6), drop, nn.Linear(6, 6), drop, nn.Linear(6, 2))
        called_twice = Twice(0.5)
    keyed = with_keyed_dropout(copy.deepcopy(row))
    assert list(keyed_layers(keyed)) == ["1.key", "3.key"]
    assert keyed[1].number != keyed[3].number
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, 6, generator=draw).double(), torch.arange(20) % 2
    for model in (row.double(), called_twice.double()):
        task = fl.Task(model, (x, y), (x, y))
        options = {"clients": fl.iid(20, 4), "rounds": 3, "batch_size": 3}
        one, two = (
            [r.metrics for r in fl.fit(fl.FedSGD(lr=0.1), task, executor=executor, **options)]
            for executor in ("loop", "vectorised")
        )
        for a, b in zip(one, two, strict=True):
            assert a == pytest.approx(b, rel=1e-9)


def test_a_second_call_in_a_step_has_a_mask_of_its_own_and_a_new_step_the_first_again():
    with torch.random.fork_rng():
        keyed = with_keyed_dropout(Twice(0.5))
    shares = []
    for _ in range(2):
        keyed.drop.calls = 0
        shares.append((keyed.drop(keyed.drop(torch.ones(200, 100))) > 0).double().mean())
    assert shares[0] == shares[1]
    assert float(shares[0]) == pytest.approx(0.25, abs=0.02)  # of one mask it would be 0.5
