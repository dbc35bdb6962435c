"""Records take exactly what is expected, and weigh what their tensors weigh."""

import pytest
import torch

import fedlamb as fl
from fedlamb.algorithms import fed_lamb
from fedlamb.wire import RecordError, downlink_bytes, kept_versions, nbytes, pack, unpack

PARAMS = {"a.weight": torch.randn(2, 3), "a.bias": torch.randn(2)}
SERVER = fl.FedLAMB(lr=0.1).server_init(PARAMS)


def test_names_are_paths():
    assert set(pack(SERVER)) == {
        "round",
        "params/a.weight",
        "params/a.bias",
        "v_hat/version",
        "v_hat/tree/a.weight",
        "v_hat/tree/a.bias",
    }


def test_an_empty_tree_is_nothing_and_comes_back_as_nothing():
    report = fed_lamb.Report(delta=PARAMS, v={})
    assert set(pack(report)) == {"delta/a.weight", "delta/a.bias"}
    back = unpack(pack(report), like=fed_lamb.Report(delta=PARAMS, v=PARAMS))
    assert back.v == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.pop("params/a.bias"), "missing in the record: params/a.bias"),
        (lambda r: r.pop("round"), "missing in the record: round"),
        (lambda r: r.update(extra=torch.zeros(1)), "unexpected in the record: extra"),
        (lambda r: r.update({"params/b": torch.zeros(1)}), "unexpected in the record: params/b"),
        (lambda r: r.update({"params/a.bias": torch.zeros(3)}), "expected torch.float32 .2,."),
        (lambda r: r.update({"params/a.bias": torch.zeros(2).double()}), "is torch.float64"),
    ],
)
def test_nothing_but_the_expected_is_taken(change, message):
    record = pack(SERVER)
    change(record)
    with pytest.raises(RecordError, match=message):
        unpack(record, like=SERVER)


def test_bytes_follow_the_type():
    assert nbytes(PARAMS) == 8 * 4
    assert nbytes({n: t.double() for n, t in PARAMS.items()}) == 8 * 8
    assert nbytes({n: t.bfloat16() for n, t in PARAMS.items()}) == 8 * 2


def test_a_kept_tree_is_sent_only_when_the_client_holds_another_version():
    algorithm = fl.FedLAMB(lr=0.1)
    sent = algorithm.broadcast(SERVER)
    assert kept_versions(sent) == {"v_hat": 0}
    assert downlink_bytes(sent, {}) == nbytes(PARAMS)  # round 1: everyone knows eps
    later = sent._replace(v_hat=sent.v_hat._replace(version=2))
    assert downlink_bytes(later, {}) == 2 * nbytes(PARAMS)
    assert downlink_bytes(later, {"v_hat": 1}) == 2 * nbytes(PARAMS)
    assert downlink_bytes(later, {"v_hat": 2}) == nbytes(PARAMS)


def test_lazy_sync_traffic_of_a_run():
    """Full participation, Z = 3: v goes up in rounds 1 and 4, v_hat comes down in 2 and 5."""
    data = fl.digits()
    task = fl.Task(fl.mlp(64, [4], 10), data.train, data.test)
    p = nbytes(task.params)
    run = fl.fit(fl.FedLAMB(lr=0.01, sync_every=3), task, clients=fl.iid(1437, 2), rounds=6)
    rounds = list(run)
    assert [r.uplink_bytes // p for r in rounds] == [4, 2, 2, 4, 2, 2]
    assert [r.downlink_bytes // p for r in rounds] == [2, 4, 2, 2, 4, 2]
