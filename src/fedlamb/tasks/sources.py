"""Where a data set's files lie, and its examples as they are stored there.

Four layouts are read: parquet files as the Hugging Face hub serves them
(`train-00000-of-00001.parquet`), an image folder (`train/CLASS/*.png`), the original IDX files of
MNIST (plain or `.gz`), and the hub itself. Nothing is decoded here except IDX, which is raw.
"""

import gzip
import hashlib
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import SettingError

Split = Literal["train", "test"]
_SPLITS: Mapping[str, Split] = {
    "train": "train",
    "training": "train",
    "test": "test",
    "valid": "test",
    "validation": "test",
    "val": "test",
}
_IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"}
_COLUMNS = ("image", "img")
_BATCH = 2000  # examples read at a time


class Stored(NamedTuple):
    """Some examples as they are stored."""

    images: list[bytes] | NDArray[np.uint8]
    """Encoded, or raw pixels with shape (examples, height, width)."""
    labels: list[Any]
    where: str | list[str]
    """The file that holds them, or a file for each."""
    first: int = 0
    """The file's row of the first example."""

    def place(self, number: int) -> str:
        """Where the example of this number lies, for messages."""
        if isinstance(self.where, list):
            return self.where[number]
        return f"{self.where}, row {self.first + number}"


@dataclass(frozen=True)
class Source:
    """One data set in one place."""

    place: str
    """A folder, or an id on the hub."""
    layout: Literal["parquet", "imagefolder", "idx", "hub"]
    files: Mapping[Split, tuple[Path, ...]]

    def fingerprint(self) -> str:
        """Changes whenever the content does (image folders: names, sizes and times)."""
        digest = hashlib.blake2b(self.layout.encode(), digest_size=12)
        if self.layout == "hub":
            digest.update(self.place.encode())
        for split, paths in self.files.items():
            for path in paths:
                digest.update(f"{split}/{path.name}/{path.stat().st_size}".encode())
                if self.layout == "imagefolder":
                    digest.update(f"{path.parent.name}/{path.stat().st_mtime_ns}".encode())
                else:
                    with path.open("rb") as file:
                        digest.update(hashlib.file_digest(file, "blake2b").digest())
        return digest.hexdigest()

    def read(self, split: Split) -> Iterator[Stored]:
        """The examples of a split, some at a time."""
        if self.layout == "imagefolder":
            yield from _image_folder(self.files[split])
        elif self.layout == "idx":
            yield _idx(*self.files[split])
        else:
            for reader, where in self._readers(split):
                yield from _rows(reader, where)

    def check(self) -> None:
        """Raises where the hub cannot be reached or does not have it; asks once, quickly."""
        if self.layout != "hub":
            return
        try:
            from huggingface_hub import HfApi
        except ImportError as error:
            raise SettingError("data", self.place, "needs: pip install 'fedlamb[data]'") from error
        try:
            HfApi().dataset_info(self.place, timeout=10)
        except Exception as error:  # whatever the network has to say
            raise SettingError(
                "data", self.place, f"cannot be reached; {_first_line(error)}"
            ) from error

    def count(self) -> int | None:
        """How many examples there are, where that is known before they are read."""
        paths = [path for paths in self.files.values() for path in paths]
        if self.layout == "imagefolder":
            return len(paths)
        if self.layout == "parquet":
            try:
                from pyarrow.parquet import read_metadata

                return sum(int(read_metadata(path).num_rows) for path in paths)
            except Exception:  # told with the file's name when it is read
                return None
        return None

    def column(self, name: str) -> list[Any]:
        """One column of the training split, such as the writer of each digit."""
        where = self.place
        if self.layout not in ("parquet", "hub"):
            raise SettingError("column", name, f"is not there: {where} has images and labels only")
        values: list[Any] = []
        for reader, at in self._readers("train"):
            if name not in reader.features:
                raise SettingError(
                    "column", name, f"is not in {at}; its columns are {', '.join(reader.features)}"
                )
            for batch in reader.select_columns([name]).iter(batch_size=10_000):
                values += batch[name]
        return values

    def _readers(self, split: Split) -> Iterator[tuple[Any, str]]:
        """A reader for each file, so that an error can name it."""
        if self.layout == "hub":
            yield _open(self.place, _hub_split(self.place, split), self.place), self.place
        for path in self.files.get(split, ()):
            yield _open("parquet", "train", str(path), data_files=str(path)), str(path)

    def class_names(self) -> list[str] | None:
        """The names of the classes, where the source tells them."""
        if self.layout == "imagefolder":
            return sorted({path.parent.name for path in self.files["train"]})
        if self.layout == "idx":
            return None
        reader, _ = next(self._readers("train"))
        names = getattr(reader.features.get("label"), "names", None)
        return list(names) if names else None


def find_source(folder: Path) -> Source | None:
    """The data set in this folder, or None where there is none; half a one is an error."""
    if not folder.is_dir():
        return None
    for layout, find in _FINDERS.items():
        files = find(folder)
        if files:
            for split in ("train", "test"):
                if split not in files:
                    names = [n for n, meaning in _SPLITS.items() if meaning == split]
                    raise SettingError(
                        "data",
                        str(folder),
                        f"has no {split} split; it may be named {', '.join(names)}",
                    )
            return Source(str(folder), layout, files)  # type: ignore[arg-type]
    return None


def hub_source(repository: str) -> Source:
    """A data set on the hub, by its id."""
    return Source(repository, "hub", {})


def _parquet_files(folder: Path) -> dict[Split, tuple[Path, ...]]:
    found: dict[Split, list[Path]] = {}
    for path in sorted(folder.rglob("*.parquet")):
        split = _SPLITS.get(re.split(r"[-_.]", path.name)[0]) or _SPLITS.get(path.parent.name)
        if split:
            found.setdefault(split, []).append(path)
    beside = {path.relative_to(folder).parts[0] for path in found.get("train", ())}
    if len(beside) > 1 and all((folder / name).is_dir() for name in beside):
        right = f"holds several data sets: {', '.join(sorted(beside))}; name one of them"
        raise SettingError("data.name", str(folder), right)
    return {split: tuple(paths) for split, paths in found.items()}


def _image_files(folder: Path) -> dict[Split, tuple[Path, ...]]:
    found: dict[Split, tuple[Path, ...]] = {}
    for name, split in _SPLITS.items():
        images = (folder / name).glob("*/*")
        paths = tuple(sorted(p for p in images if p.suffix.lower() in _IMAGES))
        if paths:
            found[split] = paths
    return found


def _idx_files(folder: Path) -> dict[Split, tuple[Path, ...]]:
    found: dict[Split, tuple[Path, ...]] = {}
    for place in (folder, folder / "raw", *folder.glob("*/raw")):
        for prefix, split in (("train", "train"), ("t10k", "test")):
            pair = []
            for part in ("images-idx3", "labels-idx1"):
                for name in (f"{prefix}-{part}-ubyte", f"{prefix}-{part.replace('-', '.')}-ubyte"):
                    pair += [p for p in (place / name, place / f"{name}.gz") if p.is_file()][:1]
            if len(pair) == 2:
                found.setdefault(split, tuple(pair))  # type: ignore[arg-type]
    return found


_FINDERS = {"parquet": _parquet_files, "idx": _idx_files, "imagefolder": _image_files}


def _open(path: str, split: str, where: str, **options: str) -> Any:
    """A streaming reader by the `datasets` library: nothing is copied, nothing decoded."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        import datasets
    except ImportError as error:
        raise SettingError("data", where, "needs: pip install 'fedlamb[data]'") from error
    try:
        found = datasets.load_dataset(path, split=split, streaming=True, **options)
        column = _image_column(found.features or next(iter(found)), where)
        return found.cast_column(column, datasets.Image(decode=False))
    except SettingError:
        raise
    except Exception as error:  # whatever pyarrow, fsspec or the network have to say
        raise SettingError("data", where, f"cannot be read; {_first_line(error)}") from error


def _rows(reader: Any, where: str) -> Iterator[Stored]:
    column = _image_column(reader.features, where)
    first = 0
    try:
        for batch in reader.iter(batch_size=_BATCH):
            if "label" not in batch:
                raise SettingError("data", where, "has no column 'label'")
            images = [image["bytes"] if image else b"" for image in batch[column]]
            yield Stored(images, list(batch["label"]), where, first)
            first += len(images)
    except SettingError:
        raise
    except Exception as error:
        raise SettingError(
            "data", where, f"cannot be read past row {first}; {_first_line(error)}"
        ) from error


def _image_column(features: Mapping[str, Any], where: str) -> str:
    """The column that holds images: by its type, or by its usual names."""
    typed = [name for name, kind in features.items() if type(kind).__name__ == "Image"]
    named = [name for name in _COLUMNS if name in features]
    if not typed and not named:
        raise SettingError(
            "data", where, f"has no image column; its columns are {', '.join(features)}"
        )
    return (typed or named)[0]


def _hub_split(repository: str, split: Split) -> str:
    import datasets

    try:
        known = datasets.get_dataset_split_names(repository)
    except Exception as error:
        raise SettingError(
            "data", repository, f"cannot be reached; {_first_line(error)}"
        ) from error
    for name in known:
        if _SPLITS.get(name) == split:
            return str(name)
    raise SettingError("data", repository, f"has no {split} split; its splits are {known}")


def _image_folder(paths: tuple[Path, ...]) -> Iterator[Stored]:
    for start in range(0, len(paths), _BATCH):
        some = paths[start : start + _BATCH]
        images = [path.read_bytes() for path in some]
        yield Stored(images, [path.parent.name for path in some], [str(path) for path in some])


def _idx(images: Path, labels: Path) -> Stored:
    pixels = _idx_array(images, dimensions=3)
    numbers = _idx_array(labels, dimensions=1)
    if len(pixels) != len(numbers):
        raise SettingError(
            "data", str(labels), f"has {len(numbers)} labels for {len(pixels)} images"
        )
    return Stored(pixels, numbers.tolist(), str(images))


def _idx_array(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """The format of the MNIST files: magic number 0x0800 + dimensions, sizes, bytes."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError) as error:
        raise SettingError("data", str(path), f"cannot be read; {error}") from error
    head = 4 + 4 * dimensions
    magic = struct.unpack(">I", data[:4])[0] if len(data) >= head else 0
    if magic != 0x0800 + dimensions:
        raise SettingError(
            "data",
            str(path),
            f"starts with {magic:#010x}, must start with {0x0800 + dimensions:#010x} (IDX)",
        )
    shape = struct.unpack(f">{dimensions}I", data[4:head])
    if len(data) - head != int(np.prod(shape)):
        raise SettingError(
            "data", str(path), f"is cut short: {len(data) - head} bytes of {int(np.prod(shape))}"
        )
    return np.frombuffer(data, np.uint8, offset=head).reshape(shape)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
