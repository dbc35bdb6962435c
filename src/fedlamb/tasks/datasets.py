"""Data sets by name: where they are looked for, and how their inputs reach a model."""

import os
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load
from torch import Tensor

from ..errors import SettingError, unknown_name
from .decoded import Report, cache_file, load_decoded
from .images import Images
from .partition import hold_out
from .sources import Source, find_source, hub_source


class Known(NamedTuple):
    """A data set that has a name."""

    hub: str
    """Its id on the Hugging Face hub."""
    crop: int
    """Padding of the random crop in training; 0: no crop and no flip."""
    about: str


KNOWN = {
    "mnist": Known("ylecun/mnist", 0, "handwritten digits, 28×28 grey, 60,000 + 10,000"),
    "fashion_mnist": Known(
        "zalando-datasets/fashion_mnist", 0, "clothes, 28×28 grey, 60,000 + 10,000"
    ),
    "cifar10": Known("uoft-cs/cifar10", 4, "photographs, 32×32 colour, 50,000 + 10,000"),
    "tiny_imagenet": Known(
        "zh-plus/tiny-imagenet", 4, "photographs of 200 classes, 64×64 colour, 100,000 + 10,000"
    ),
}
"""Data sets that are found on disk or on the hub."""

NAMES = ("digits", *KNOWN)


class Dataset(NamedTuple):
    """Training and test examples, and how inputs are prepared for a model."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    names: list[str]
    """Of the classes."""
    inputs: Images | None = None
    validation: tuple[Tensor, Tensor] | None = None
    rows: Tensor | None = None
    """The rows of the whole training set that `train` holds, where some were set aside."""
    source: Source | None = None

    def with_validation(self, share: float, seed: int = 0) -> "Dataset":
        """A random share of the training set, set aside for tuning."""
        x, y = self.train
        kept, aside = hold_out(len(y), share, seed)
        return self._replace(train=(x[kept], y[kept]), validation=(x[aside], y[aside]), rows=kept)

    def to(self, device: torch.device) -> "Dataset":
        """The same on a device, for many tasks that share it."""
        train, test, aside = (
            None if pair is None else (pair[0].to(device), pair[1].to(device))
            for pair in (self.train, self.test, self.validation)
        )
        assert train is not None
        assert test is not None
        return self._replace(train=train, test=test, validation=aside)

    def column(self, name: str) -> list[object]:
        """One more column of the training rows, such as the writer of each digit."""
        if self.source is None:
            raise SettingError(
                "column", name, "is not there: the digits have images and labels only"
            )
        values = self.source.column(name)
        return values if self.rows is None else [values[row] for row in self.rows.tolist()]


def digits() -> Dataset:
    """Handwritten digits, embedded: 1,797 real grey images of 8×8 pixels, in [0, 1].

    1,437 for training and 360 for testing, by a fixed shuffle. These are scikit-learn's digits
    (Alpaydin, Kaynak: Optical Recognition of Handwritten Digits, UCI, CC BY 4.0).
    """
    stored = load(files(__package__).joinpath("digits.safetensors").read_bytes())
    order = torch.from_numpy(np.random.default_rng(0).permutation(1797))
    x, y = stored["images"][order].float().unsqueeze(1) / 16, stored["labels"][order].long()
    return Dataset((x[:1437], y[:1437]), (x[1437:], y[1437:]), [str(c) for c in range(10)])


def load_dataset(
    name: str, root: str | Path | None = None, report: Report = lambda done, total: None
) -> Dataset:
    """A data set by name, by its id on the hub (`owner/name`), or the one in a folder.

    A name is looked for as ROOT/NAME in `root`, then in $FEDLAMB_DATA, then in the user's cache,
    then on the hub. Decoded once, with `report` told the examples done and their total where it
    is known; memory-mapped afterwards.
    """
    if name == "digits":
        return digits()
    source = locate(name, root)
    decoded = load_decoded(source, label(name), decoded_folder(), report)
    known = KNOWN.get(name)
    inputs = Images(decoded.mean, decoded.std, crop=known.crop if known else 0)
    return Dataset(decoded.train, decoded.test, decoded.names, inputs, source=source)


def locate(name: str, root: str | Path | None = None) -> Source:
    """Where a data set lies; an error tells all that was tried."""
    local = find_local(name, root)
    if local is not None:
        return local
    if name in KNOWN:
        repository = KNOWN[name].hub
    elif Path(name).is_dir():
        raise SettingError(
            "data.name", name, "holds neither parquet files, nor train/CLASS/*.png, nor IDX files"
        )
    elif name.count("/") == 1 and not name.startswith((".", "/", "~")):
        repository = name
    else:
        raise unknown_name("data.name", name, [*NAMES, "a folder, or owner/name on the hub"])
    if root is not None and find_source(Path(root).expanduser()) is not None:
        above = Path(root).expanduser().absolute().parent
        right = f"holds a data set itself, and must hold folders of them; perhaps {above}"
        raise SettingError("data.root", str(root), right)
    source = hub_source(repository)
    if cache_file(source, label(name), decoded_folder()).exists():
        return source
    try:
        source.check()
    except SettingError as error:
        tried = ", ".join(str(place) for place in places(name, root))
        raise SettingError(
            "data.name",
            name,
            f"was found neither in {tried} nor on the hub as {repository} ({error.right}); "
            f"either give the folder that holds {label(name)}/ with --data-root or FEDLAMB_DATA, "
            "or run this once with the hub in reach",
        ) from error
    return source


def find_local(name: str, root: str | Path | None = None) -> Source | None:
    """The data set on this machine's disk, or None."""
    for place in places(name, root):
        source = find_source(place)
        if source is not None:
            return source
    return None


def places(name: str, root: str | Path | None = None) -> list[Path]:
    """The folders in which a data set is looked for, in this order."""
    if root is not None and not Path(root).expanduser().is_dir():
        raise SettingError(
            "data.root", str(root), "must be a folder that exists, with mnist/ and so on"
        )
    roots = [root, os.environ.get("FEDLAMB_DATA"), cache_folder() / "data"]
    found = [Path(r).expanduser() / name for r in roots if r]
    return found if name in KNOWN else [Path(name).expanduser(), *found]


def label(name: str) -> str:
    """A short name for files and messages."""
    return Path(name).resolve().name if Path(name).is_dir() else name.rpartition("/")[2]


def cache_folder() -> Path:
    """Where data lie: $XDG_CACHE_HOME/fedlamb, or ~/.cache/fedlamb."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedlamb"


def decoded_folder() -> Path:
    """Where decoded data sets lie."""
    return cache_folder() / "decoded"
