"""Keyed dropout: right shares, independent layers and keys, left alone in evaluation."""

import copy

import pytest
import torch
from torch import nn

import fedlamb as fl
from fedlamb.tasks.dropout import KeyedDropout, key_names, with_keyed_dropout


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
    assert key_names(keyed) == ["1.key", "2.0.key", "2.1.key", "3.key"]
    x, y = torch.ones(20, 6), torch.arange(20) % 2
    run = fl.fit(fl.FedSGD(lr=0.1), fl.Task(model, (x, y), (x, y)), clients=fl.iid(20, 2), rounds=1)
    next(run)
    kinds = [type(m) for m in model.modules()]
    assert [type(m) for m in run.model().modules()] == kinds
    assert KeyedDropout not in kinds
