"""Checkpoints are whole or absent, and belong to one run."""

import os
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

import fedlamb as fl
from fedlamb.checkpoint import load_checkpoint, save_checkpoint
from problems import Small

SMALL = Small(sizes=(6, 9, 4), rounds=4, seed=3)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    run = SMALL.fit(fl.FedLAMB(lr=0.05))
    next(run)
    run.save(tmp_path / "c.safetensors")
    return tmp_path / "c.safetensors"


def test_a_crash_while_writing_leaves_the_old_file(saved, monkeypatch):
    before = saved.read_bytes()

    def half(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr("fedlamb.checkpoint.save_file", half)
    run = SMALL.fit(fl.FedLAMB(lr=0.05))
    next(run)
    with pytest.raises(OSError, match="No space"):
        run.save(saved)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


def test_a_file_cut_in_half_is_refused(saved):
    saved.write_bytes(saved.read_bytes()[:-100])
    with pytest.raises(fl.SettingError, match="checkpoint = .*: cannot be read"):
        SMALL.fit(fl.FedLAMB(lr=0.05)).restore(saved)


@pytest.mark.parametrize("place", [-40, -1])
def test_a_file_with_another_byte_is_refused(saved, place):
    data = bytearray(saved.read_bytes())
    data[place] ^= 0x80
    saved.write_bytes(data)
    with pytest.raises(fl.SettingError, match="checkpoint = .*: is damaged"):
        SMALL.fit(fl.FedLAMB(lr=0.05)).restore(saved)


def test_facts_that_were_changed_are_noticed(tmp_path):
    path = tmp_path / "c.safetensors"
    save_checkpoint(path, {"x": torch.tensor([True, False]), "y": torch.zeros(0)}, {"number": 3})
    assert load_checkpoint(path)[1] == {"number": 3}
    path.write_bytes(path.read_bytes().replace(b'number\\": 3', b'number\\": 4'))
    with pytest.raises(fl.SettingError, match="is damaged"):
        load_checkpoint(path)


def test_a_file_of_another_kind_is_refused(saved):
    save_file({"x": torch.zeros(1)}, saved)
    with pytest.raises(fl.SettingError, match="must be a fedlamb-checkpoint/2 file"):
        SMALL.fit(fl.FedLAMB(lr=0.05)).restore(saved)


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(fl.SettingError, match="cannot be read"):
        SMALL.fit(fl.FedLAMB(lr=0.05)).restore(tmp_path / "none")


@pytest.mark.parametrize(
    ("other", "key"),
    [
        (lambda: SMALL.fit(fl.FedLAMB(lr=0.06)), "algorithm.lr"),
        (lambda: SMALL.fit(fl.FedAMS(lr=0.05)), "algorithm.class"),
        (lambda: SMALL.fit(fl.FedLAMB(lr=0.05), seed=4), "seed"),
        (lambda: SMALL.fit(fl.FedLAMB(lr=0.05), batch_size=2), "batch_size"),
        (lambda: SMALL.fit(fl.FedLAMB(lr=0.05), epochs=2), "epochs"),
        (lambda: SMALL.fit(fl.FedLAMB(lr=0.05), fraction=0.5), "fraction"),
        (lambda: SMALL.fit(fl.FedLAMB(lr=0.05), weighting="examples"), "weighting"),
        (lambda: SMALL.fit(fl.FedLAMB(lr=0.05), clients=[[0], [1], [2]]), "clients"),
    ],
)
def test_a_run_with_other_settings_is_refused(saved, other, key):
    with pytest.raises(fl.SettingError, match=f"was made with {key} = "):
        other().restore(saved)


def test_a_model_of_another_shape_is_refused(saved):
    wider = fl.mlp(4, [7], 3).double()
    task = fl.Task(wider, train=SMALL.data(), test=SMALL.data())
    run = fl.fit(fl.FedLAMB(lr=0.05), task, clients=SMALL.clients(), rounds=4, batch_size=3, seed=3)
    with pytest.raises(fl.SettingError, match="does not fit the model; "):
        run.restore(saved)


def test_a_model_or_a_loss_of_another_kind_is_refused(saved):
    rows = {"train": SMALL.data(), "test": SMALL.data()}
    same = SMALL.module()
    bent = nn.Sequential(*(nn.ReLU() if isinstance(m, nn.Tanh) else m for m in same))
    assert repr(bent) != repr(same)
    other = {"model": fl.Task(bent, **rows)}
    other["loss"] = fl.Task(same, loss=nn.functional.multi_margin_loss, **rows)
    options = {"clients": SMALL.clients(), "rounds": 4, "batch_size": 3, "seed": 3}
    for key, task in other.items():
        run = fl.fit(fl.FedLAMB(lr=0.05), task, **options)
        with pytest.raises(fl.SettingError, match=f"was made with {key} = "):
            run.restore(saved)


def test_other_data_are_refused(saved):
    x, y = SMALL.data()
    task = fl.Task(SMALL.module(), train=(x + 1, y), test=(x, y))
    run = fl.fit(fl.FedLAMB(lr=0.05), task, clients=SMALL.clients(), rounds=4, batch_size=3, seed=3)
    with pytest.raises(fl.SettingError, match="was made with data = "):
        run.restore(saved)


def test_another_lambda_is_refused(tmp_path):
    run = SMALL.fit(fl.FedLAMB(lr=0.05, schedule=lambda r: 1 / r))
    run.save(tmp_path / "c")
    with pytest.raises(fl.SettingError, match="was made with algorithm.schedule = "):
        SMALL.fit(fl.FedLAMB(lr=0.05, schedule=lambda r: 0.5**r)).restore(tmp_path / "c")
    SMALL.fit(fl.FedLAMB(lr=0.05, schedule=lambda r: 1 / r)).restore(tmp_path / "c")


def test_a_checkpoint_is_on_the_disk_before_it_takes_its_place(saved, monkeypatch):
    events = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append("fsync"), fsync(fd))[1])
    monkeypatch.setattr(Path, "replace", lambda a, b: (events.append("replace"), replace(a, b))[1])
    SMALL.fit(fl.FedLAMB(lr=0.05)).save(saved)
    assert events == ["fsync", "replace", "fsync"]


def test_a_full_disk_is_told_as_an_error_of_the_system(saved, monkeypatch):
    def full(tensors, path, metadata):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("fedlamb.checkpoint.save_file", full)
    with pytest.raises(OSError, match="cannot be written; No space left"):
        SMALL.fit(fl.FedLAMB(lr=0.05)).save(saved)


def test_a_folder_that_is_not_there_is_told(tmp_path):
    with pytest.raises(fl.SettingError, match="must be a file in a folder that exists"):
        SMALL.fit(fl.FedLAMB(lr=0.05)).save(tmp_path / "none" / "c")


def test_more_rounds_may_be_added(saved):
    run = SMALL.fit(fl.FedLAMB(lr=0.05), rounds=9)
    run.restore(saved)
    assert [r.number for r in run] == list(range(2, 10))


def test_it_is_a_plain_safetensors_file(saved):
    names = load_file(saved)
    assert "server/params/0.weight" in names
    assert "client/0/m/0.weight" in names


def test_tensors_that_share_memory_are_stored_each(tmp_path):
    whole = torch.arange(6.0)
    save_checkpoint(tmp_path / "c", {"a": whole, "b": whole[:3], "c": whole.view(2, 3).t()}, {})
    tensors, _ = load_checkpoint(tmp_path / "c")
    assert tensors["b"].tolist() == [0, 1, 2]
    assert tensors["c"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_what_is_loaded_begins_in_memory_where_any_tensor_does(tmp_path):
    """Where a matrix begins decides the last bits of some of its products."""
    tensors = {str(i): torch.ones(i, i + 1) for i in range(1, 20)}
    save_checkpoint(tmp_path / "c", tensors, {})
    found, _ = load_checkpoint(tmp_path / "c")
    assert {t.data_ptr() % 64 for t in found.values()} == {0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch_size", [1, 7])
def test_products_of_any_size_go_on_to_the_same_bits(tmp_path, dtype, batch_size):
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(99, 13, generator=draw, dtype=dtype)
    y = torch.randint(7, (99,), generator=draw)
    task = fl.Task(fl.mlp(13, [64], 7).to(dtype), (x, y), (x, y))
    options = {"clients": fl.iid(99, 3), "batch_size": batch_size, "rounds": 4}
    whole, later = (fl.fit(fl.MimeLAMB(lr=0.02), task, **options) for _ in range(2))
    for done in whole:
        if done.number == 2:
            whole.save(tmp_path / "c")
    later.restore(tmp_path / "c")
    list(later)
    assert all(torch.equal(value, later.params[name]) for name, value in whole.params.items())


def test_other_inputs_or_precision_are_refused(tmp_path):
    x, y = torch.arange(64, dtype=torch.uint8).reshape(4, 1, 4, 4), torch.arange(4)

    def run(inputs=(120.0, 60.0, 1), precision="float32"):
        mean, std, crop = inputs
        task = fl.Task(
            fl.mlp(16, [], 4), (x, y), (x, y), precision=precision,
            inputs=fl.Images((mean,), (std,), crop),
        )  # fmt: skip
        return fl.fit(fl.FedSGD(lr=0.1), task, clients=[[0, 1], [2, 3]], rounds=2)

    run().save(tmp_path / "c")
    run().restore(tmp_path / "c")
    for other in ((0.0, 60.0, 1), (120.0, 255.0, 1), (120.0, 60.0, 0)):
        with pytest.raises(fl.SettingError, match="was made with inputs = "):
            run(other).restore(tmp_path / "c")
    with pytest.raises(fl.SettingError, match="was made with precision = 'float32'"):
        run(precision="bf16").restore(tmp_path / "c")
