"""Data sets from every format: found, decoded once, kept whole; defects told by file and row."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import fedlamb as fl
from fedlamb.experiment import build_run, load_data
from fedlamb.settings import load_experiment
from fedlamb.tasks import datasets as sets
from fedlamb.tasks import decoded as decoding
from fedlamb.tasks.decoder import Decoder, DecodingError
from fedlamb.tasks.sources import Source
from formats import NAMES, encoded, idx, pictures, write_idx, write_image_folder, write_parquet

LABELS = [0, 1, 2, 0, 1, 2, 0]
TEST_LABELS = [2, 1, 0]
REAL = Path(__file__).parent.parent.parent / "shared/data"
real = pytest.mark.skipif(not REAL.is_dir(), reason="the real data sets are not on this machine")


@pytest.fixture(autouse=True)
def own_places(tmp_path, monkeypatch):
    """No test sees the user's data or cache, or waits for the hub."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDLAMB_DATA", raising=False)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def parquet(folder: Path, train=None, test=None, labels=LABELS, **options) -> Path:
    train = [encoded(p) for p in pictures(7)] if train is None else train
    test = [encoded(p) for p in pictures(3, seed=1)] if test is None else test
    cut = len(train) // 2
    return write_parquet(
        folder,
        {
            "train-00000-of-00002": train[:cut],
            "train-00001-of-00002": train[cut:],
            "test-00000-of-00001": test,
        },
        {
            "train-00000-of-00002": labels[:cut],
            "train-00001-of-00002": labels[cut:],
            "test-00000-of-00001": TEST_LABELS,
        },
        **options,
    )


def check(data: fl.Dataset, train=None, test=None, labels=LABELS, test_labels=TEST_LABELS):
    train = pictures(7) if train is None else train
    test = pictures(3, seed=1) if test is None else test
    for (x, y), images, expected in (
        (data.train, train, labels),
        (data.test, test, test_labels),
    ):
        channels_first = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
        assert x.dtype == torch.uint8
        assert np.array_equal(x.numpy(), channels_first)
        assert y.dtype == torch.int64
        assert y.tolist() == list(expected)


@pytest.mark.parametrize("column", ["image", "img", "picture"])
def test_parquet_as_the_hub_serves_it(tmp_path, column):
    folder = parquet(tmp_path / "set", column=column)
    data = fl.load_dataset(str(folder))
    check(data)
    assert data.names == NAMES
    assert data.inputs is not None
    np.testing.assert_allclose(data.inputs.mean, pictures(7).mean())
    assert data.inputs.crop == 0


def test_a_parquet_file_without_types_is_read_by_its_usual_names(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    for split, count, labels, seed in (("train", 7, LABELS, 0), ("test", 3, TEST_LABELS, 1)):
        images = [{"bytes": encoded(p), "path": None} for p in pictures(count, seed=seed)]
        pq.write_table(pa.table({"img": images, "label": labels}), tmp_path / f"{split}.parquet")
    data = fl.load_dataset(str(tmp_path))
    check(data)
    assert data.names == ["0", "1", "2"]


def test_an_image_folder(tmp_path):
    write_image_folder(tmp_path / "pets", pictures(6, channels=3), pictures(3, channels=3, seed=1))
    data = fl.load_dataset(str(tmp_path / "pets"))
    by_class = [0, 3, 1, 4, 2, 5]
    check(
        data,
        pictures(6, channels=3)[by_class],
        pictures(3, channels=3, seed=1),
        [0, 0, 1, 1, 2, 2],
        [0, 1, 2],
    )
    assert data.names == NAMES


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("place", ["", "raw", "MNIST/raw"])
def test_idx_files_plain_and_zipped_where_others_put_them(tmp_path, zipped, place):
    write_idx(tmp_path / "mnist" / place, pictures(7), pictures(3, seed=1), zipped, dots=not place)
    data = fl.load_dataset("mnist", root=tmp_path)
    check(data, labels=[0, 1, 2, 0, 1, 2, 0], test_labels=[0, 1, 2])


def test_grey_images_among_coloured_ones_become_coloured(tmp_path):
    grey, coloured = pictures(4), pictures(3, channels=3)
    folder = parquet(tmp_path / "set", train=[encoded(p) for p in [*grey, *coloured]])
    data = fl.load_dataset(str(folder))
    whole = np.concatenate([np.repeat(grey[..., None], 3, axis=3), coloured])
    check(data, whole, np.repeat(pictures(3, seed=1)[..., None], 3, axis=3))


def test_places_are_tried_in_order(tmp_path, monkeypatch):
    roots = {name: tmp_path / name for name in ("given", "env")}
    user = tmp_path / "cache/fedlamb/data"
    roots["given"].mkdir()
    monkeypatch.setenv("FEDLAMB_DATA", str(roots["env"]))
    for seed, root in enumerate((user, roots["env"], roots["given"])):
        write_idx(root / "mnist", pictures(7, seed=seed), pictures(3, seed=1))
        data = fl.load_dataset("mnist", root=roots["given"])
        assert np.array_equal(data.train[0].numpy()[:, 0], pictures(7, seed=seed))


def test_not_found_tells_what_was_tried_and_the_two_ways(tmp_path):
    (tmp_path / "nothing").mkdir()
    with pytest.raises(fl.SettingError) as caught:
        fl.load_dataset("mnist", root=tmp_path / "nothing")
    message = str(caught.value)
    for part in (
        str(tmp_path / "nothing" / "mnist"),
        str(tmp_path / "cache/fedlamb/data/mnist"),
        "on the hub as ylecun/mnist",
        "--data-root or FEDLAMB_DATA",
        "with the hub in reach",
    ):
        assert part in message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["mnits", "./nowhere", "no/such/folder"])
def test_an_unknown_name_is_told(name):
    with pytest.raises(fl.SettingError, match=f"data.name = {re.escape(repr(name))}: is unknown"):
        fl.load_dataset(name)


def test_the_hub_is_read_as_local_files_are(tmp_path, monkeypatch):
    """The hub's code path, with `datasets` opening local files of the same form in its place."""
    import datasets

    folder = parquet(tmp_path / "elsewhere", column="img")
    files = {
        "train": sorted(str(p) for p in folder.glob("train*")),
        "valid": str(folder / "test-00000-of-00001.parquet"),
    }
    asked = []

    def from_the_hub(path, split, streaming, **options):
        asked.append((path, split))
        return local("parquet", data_files=files, split=split, streaming=streaming)

    local = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", from_the_hub)
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda path: ["train", "valid"])
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda self, path, timeout: None)
    check(fl.load_dataset("cifar10"))
    assert set(asked) == {("uoft-cs/cifar10", "train"), ("uoft-cs/cifar10", "valid")}
    asked.clear()
    check(fl.load_dataset("somebody/cifar10"))
    assert set(asked) == {("somebody/cifar10", "train"), ("somebody/cifar10", "valid")}


# The cache


def caches() -> list[Path]:
    folder = sets.decoded_folder()
    return [p for p in folder.iterdir() if not p.name.endswith(".lock")] if folder.exists() else []


def test_the_second_load_reads_the_cache_and_changed_content_makes_another(tmp_path, monkeypatch):
    folder = parquet(tmp_path / "set")
    told = []
    fl.load_dataset(str(folder), report=lambda done, total: told.append((done, total)))
    assert (told[0], told[-1]) == ((0, None), (10, 10))  # a word before anything takes long
    assert len(caches()) == 1
    with monkeypatch.context() as patch:
        patch.setattr(decoding, "decode", None)  # must not be called
        check(fl.load_dataset(str(folder)))
    other = [encoded(p) for p in pictures(7, seed=9)]
    parquet(tmp_path / "set", train=other)
    check(fl.load_dataset(str(folder)), train=pictures(7, seed=9))
    assert len(caches()) == 2


@pytest.mark.parametrize("damage", ["cut in half", "empty", "of another format"])
def test_a_damaged_cache_is_never_used(tmp_path, damage):
    folder = parquet(tmp_path / "set")
    fl.load_dataset(str(folder))
    (path,) = caches()
    data = path.read_bytes()
    cut = {"cut in half": data[: len(data) // 2], "empty": b""}
    path.write_bytes(cut.get(damage, data.replace(b"fedlamb-images/1", b"fedlamb-images/0")))
    check(fl.load_dataset(str(folder)))
    assert path.stat().st_size == len(data)


def test_a_failure_or_a_kill_while_writing_leaves_nothing_in_use(tmp_path, monkeypatch):
    folder = parquet(tmp_path / "set")

    def breaks(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(decoding, "save_file", breaks)
        with pytest.raises(fl.SettingError, match="cache = .*cannot be written; No space left"):
            fl.load_dataset(str(folder))
    assert caches() == []
    fl.load_dataset(str(folder))
    (path,) = caches()
    path.unlink()
    left = path.with_name(f".{path.name}.12345")  # what a killed process leaves
    left.write_bytes(b"half")
    check(fl.load_dataset(str(folder)))
    assert caches() == [path]


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path):
    """A limit on the size of files stands in for a disk without room: the kernel refuses alike."""
    folder = write_idx(tmp_path / "big", pictures(3000, size=8), pictures(30, size=8))
    code = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (60000, 60000))\n"
        "import fedlamb as fl\n"
        "try:\n    fl.load_dataset(sys.argv[1])\n"
        "except fl.SettingError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ,
    )
    assert "cannot be written" in done.stdout, done.stdout + done.stderr
    assert "File too large" in done.stdout
    assert caches() == []


def test_two_processes_decode_once(tmp_path):
    folder = write_idx(tmp_path / "set", pictures(2000), pictures(30))
    code = (
        "import sys, fedlamb as fl\n"
        "told = []\n"
        "fl.load_dataset(sys.argv[1], report=lambda done, total: told.append(done))\n"
        "print(len(told) > 0)\n"
    )
    start = [sys.executable, "-c", code, str(folder)]
    both = [subprocess.Popen(start, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = sorted(p.communicate()[0].strip() for p in both)
    assert said == ["False", "True"]
    assert len(caches()) == 1


# Bad input, told with file and row


def refuse(folder: Path, *parts: str) -> None:
    with pytest.raises(fl.SettingError) as caught:
        fl.load_dataset(str(folder))
    for part in parts:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caches() == []


def test_a_truncated_parquet_file(tmp_path):
    folder = parquet(tmp_path / "set")
    path = folder / "train-00001-of-00002.parquet"
    path.write_bytes(path.read_bytes()[:-200])
    refuse(folder, str(path), "cannot be read")


def test_an_image_that_does_not_decode(tmp_path):
    images = [encoded(p) for p in pictures(7)]
    images[5] = images[5][:40]
    folder = parquet(tmp_path / "set", train=images)
    refuse(folder, str(folder / "train-00001-of-00002.parquet") + ", row 2", "can be decoded")
    images[5] = b""
    folder = parquet(tmp_path / "set2", train=images)
    refuse(folder, "train-00001-of-00002.parquet, row 2", "can be decoded")


def test_many_images_are_decoded_by_other_processes(tmp_path, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    images = pictures(1501, channels=3)
    data = [encoded(p) for p in images]
    with Decoder() as decoder:
        found = decoder.decode(data)
        assert np.array_equal(np.stack(found), images)
        data[1203] = b"no image"
        with pytest.raises(DecodingError) as caught:
            decoder.decode(data)
        assert caught.value.row == 1203
        assert len(decoder.decode(data[:1200])) == 1200  # and it goes on
        for worker in decoder._workers:
            worker.kill()
        with pytest.raises((DecodingError, BrokenPipeError)):
            decoder.decode(data[:1200])
    assert all(worker.poll() is not None for worker in decoder._workers)


def test_an_image_file_that_does_not_decode(tmp_path):
    folder = write_image_folder(tmp_path / "pets", pictures(6), pictures(3))
    bad = folder / "train/dog/004.png"
    bad.write_bytes(b"no image")
    refuse(folder, str(bad), "can be decoded")


def test_labels_out_of_range(tmp_path):
    folder = parquet(tmp_path / "set", labels=[0, 1, 2, 0, -1, 2, 0], names=None)
    refuse(folder, str(folder / "train-00001-of-00002.parquet") + ", row 1", "label -1")
    folder = write_idx(tmp_path / "idx", pictures(7), pictures(3))
    (folder / "t10k-labels-idx1-ubyte").write_bytes(idx(np.array([0, 1, 9])))
    refuse(folder, str(folder / "t10k-images-idx3-ubyte") + ", row 2", "label 9", "3 classes")


def test_images_of_two_sizes(tmp_path):
    images = [encoded(p) for p in [*pictures(4), *pictures(3, size=5)]]
    folder = parquet(tmp_path / "set", train=images)
    refuse(folder, "train-00001-of-00002.parquet, row 1", "5×5 pixels", "6×6")
    folder = parquet(tmp_path / "two", test=[encoded(p) for p in pictures(3, size=5)])
    refuse(folder, "(5, 5)", "(6, 6)")


def test_a_folder_without_a_test_split(tmp_path):
    folder = parquet(tmp_path / "set")
    (folder / "test-00000-of-00001.parquet").unlink()
    refuse(folder, str(folder), "has no test split; it may be named test, valid")
    folder = write_image_folder(tmp_path / "pets", pictures(6), pictures(3))
    (folder / "test").rename(folder / "pictures")
    refuse(folder, str(folder), "has no test split")
    folder = write_idx(tmp_path / "idx", pictures(6), pictures(3))
    (folder / "t10k-labels-idx1-ubyte").unlink()
    refuse(folder, str(folder), "has no test split")


def test_a_missing_class(tmp_path):
    folder = parquet(tmp_path / "set", labels=[0, 1, 1, 0, 1, 0, 0])
    refuse(folder, str(folder), "no training example of class 'owl'")


def test_a_class_that_only_the_test_split_has(tmp_path):
    folder = write_image_folder(tmp_path / "pets", pictures(6), pictures(3))
    (folder / "test/owl").rename(folder / "test/newt")
    refuse(folder, "test/newt/002.png", "label 'newt'")


def test_no_image_column_and_no_label(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    for split in ("train", "test"):
        pq.write_table(pa.table({"text": ["a"], "label": [0]}), tmp_path / f"{split}.parquet")
    refuse(tmp_path, "train.parquet", "has no image column; its columns are text, label")
    images = [{"bytes": encoded(pictures(1)[0]), "path": None}]
    for split in ("train", "test"):
        pq.write_table(pa.table({"image": images}), tmp_path / f"{split}.parquet")
    refuse(tmp_path, "train.parquet", "has no column 'label'")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("train-images-idx3-ubyte", b"\x00\x00\x08\x01" + bytes(60), "starts with 0x00000801"),
        ("train-images-idx3-ubyte", b"\x89PNG" + bytes(60), "must start with 0x00000803 (IDX)"),
        ("train-labels-idx1-ubyte", b"", "must start with 0x00000801 (IDX)"),
        ("train-labels-idx1-ubyte", idx(np.arange(7))[:-1], "is cut short: 6 bytes of 7"),
        ("train-labels-idx1-ubyte", idx(np.arange(6)), "has 6 labels for 7 images"),
    ],
    ids=["magic of labels", "magic of PNG", "empty", "cut short", "too few labels"],
)
def test_bad_idx_files(tmp_path, name, data, message):
    folder = write_idx(tmp_path / "idx", pictures(7), pictures(3))
    (folder / name).write_bytes(data)
    refuse(folder, str(folder / name), message)


def test_a_bad_gz_file(tmp_path):
    folder = write_idx(tmp_path / "idx", pictures(7), pictures(3), zipped=True)
    path = folder / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-20])
    refuse(folder, str(path), "cannot be read")


def test_an_empty_folder(tmp_path):
    refuse(tmp_path, "holds neither parquet files, nor train/CLASS/*.png, nor IDX files")


def test_without_the_extra_the_message_says_how_to_get_it(tmp_path, monkeypatch):
    folder = parquet(tmp_path / "set")
    monkeypatch.setitem(sys.modules, "datasets", None)
    refuse(folder, "needs: pip install 'fedlamb[data]'")


# Validation, columns and lists of rows


def test_validation_is_set_aside_and_seeded(tmp_path):
    data = fl.digits()
    one, two, other = (data.with_validation(0.1, seed) for seed in (0, 0, 1))
    assert one.validation is not None
    assert len(one.validation[1]) == 144
    assert len(one.train[1]) == 1437 - 144
    assert torch.equal(one.train[0], two.train[0])
    assert not torch.equal(one.train[0], other.train[0])
    whole = torch.cat([one.train[0], one.validation[0]]).sum()
    assert float(whole) == pytest.approx(float(data.train[0].sum()), rel=1e-6)


def test_a_column_decides_the_clients_also_beside_a_validation_share(tmp_path):
    writers = ["ann", "bob", "ann", "cy", "cy", "cy", "bob"]
    rows = iter([writers[:3], writers[3:], writers])
    folder = tmp_path / "set"
    for stem, count, labels in (
        ("train-00000-of-00002", slice(0, 3), LABELS[:3]),
        ("train-00001-of-00002", slice(3, 7), LABELS[3:]),
        ("test-00000-of-00001", slice(0, 3), LABELS[:3]),
    ):
        images = [encoded(p) for p in pictures(7)[count]]
        write_parquet(folder, {stem: images}, {stem: labels}, writer=next(rows))
    data = fl.load_dataset(str(folder))
    parts = fl.by_value(data.column("writer"))
    assert [p.tolist() for p in parts] == [[0, 2], [1, 6], [3, 4, 5]]
    less = data.with_validation(0.3, seed=0)
    assert less.rows is not None
    assert less.column("writer") == [writers[i] for i in less.rows.tolist()]
    with pytest.raises(fl.SettingError, match="column = 'who': is not in .*its columns are"):
        data.column("who")


# The real sets


@real
@pytest.mark.parametrize(
    ("name", "train", "test", "shape", "classes"),
    [
        ("mnist", 60_000, 10_000, (1, 28, 28), 10),
        ("fashion_mnist", 60_000, 10_000, (1, 28, 28), 10),
        ("cifar10", 50_000, 10_000, (3, 32, 32), 10),
        ("tiny_imagenet", 50_000, 10_000, (3, 64, 64), 200),
    ],
)
def test_real_sets(name, train, test, shape, classes, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(REAL_CACHE))
    data = fl.load_dataset(name, root=REAL)
    assert data.train[0].shape == (train, *shape)
    assert data.test[0].shape == (test, *shape)
    assert len(data.names) == classes
    assert torch.bincount(data.train[1], minlength=classes).min() > 0
    if name != "mnist" and name != "tiny_imagenet":
        assert torch.bincount(data.test[1]).tolist() == [test // classes] * classes
    if name == "mnist":  # the well-known figures
        assert data.inputs is not None
        assert data.inputs.mean[0] / 255 == pytest.approx(0.1307, abs=1e-4)
        assert data.inputs.std[0] / 255 == pytest.approx(0.3081, abs=1e-4)
        assert torch.bincount(data.train[1]).tolist()[:2] == [5923, 6742]


@real
def test_fed_lamb_passes_95_percent_on_real_mnist_within_10_rounds(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(REAL_CACHE))
    changes = ["federation.rounds=10", f"data.root={REAL}"]
    run = build_run(load_experiment("mnist-mlp-iid", changes), "fed-lamb")
    assert max(r.metrics["test_accuracy"] for r in run) > 0.95


@real
@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("fashion-mnist-cnn-iid", []),
        # One client of 1,000: two cores take some twenty minutes for a whole round.
        ("cifar10-resnet18-iid", ["split={kind='iid', clients=1000}", "federation.fraction=0.001"]),
    ],
)
def test_a_round_on_real_images(preset, changes, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(REAL_CACHE))
    experiment = load_experiment(preset, ["federation.rounds=1", f"data.root={REAL}", *changes])
    data = load_data(experiment)
    few = data._replace(test=(data.test[0][:500], data.test[1][:500]))
    for method in ("fed-lamb", "mime-lamb"):
        done = next(build_run(experiment, method, few))
        assert np.isfinite(list(done.metrics.values())).all()


REAL_CACHE = Path(__file__).parent.parent / ".pytest_cache" / "data"  # kept between test runs


def test_a_root_that_does_not_exist_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        fl.SettingError, match=r"data.root = .*nowhere.*must be a folder that exists"
    ):
        fl.load_dataset("mnist", root=tmp_path / "nowhere")


def test_a_root_that_is_the_data_set_itself_is_told_before_the_hub_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Source, "check", lambda source: pytest.fail("asked"))
    write_idx(tmp_path / "data/mnist", pictures(20), pictures(10))
    above = re.escape(str(tmp_path / "data"))
    with pytest.raises(fl.SettingError, match=rf"must hold folders of them; perhaps {above}$"):
        fl.load_dataset("mnist", root=tmp_path / "data/mnist")
    assert len(fl.load_dataset("mnist", root=tmp_path / "data").train[0]) == 20


def test_a_folder_of_several_data_sets_is_none(tmp_path: Path) -> None:
    for name in ("one", "two"):
        parquet(tmp_path / "both" / name)
    with pytest.raises(fl.SettingError, match="several data sets: one, two; name one of them"):
        fl.load_dataset(str(tmp_path / "both"))
    assert len(fl.load_dataset(str(tmp_path / "both/one")).train[1]) > 0
