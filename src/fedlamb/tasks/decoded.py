"""Decoded data sets: uint8 tensors in one memory-mapped safetensors file, keyed by content."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import SettingError
from ..files import exclusive, remove_leftovers, written_aside
from .images import channel_statistics
from .sources import Source, Split, Stored

if TYPE_CHECKING:
    from .decoder import Decoder

Pixels = NDArray[np.uint8]
_FORMAT = "fedlamb-images/1"
Report = Callable[[int, int | None], None]
"""Told how many examples are decoded so far, and of how many where that is known."""


class Decoded(NamedTuple):
    """Images (examples, channels, height, width) in uint8, and labels from 0 on."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    names: list[str]
    """Of the classes."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    """Of the training pixels, for each channel."""


def load_decoded(source: Source, name: str, cache: Path, report: Report) -> Decoded:
    """The data set from its cache file, which is made first where it is not there yet."""
    path = cache_file(source, name, cache)
    found = _read(path)
    if found is not None:
        return found
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # Another process may be making the same file: then this one waits for it.
        with exclusive(cache / f"{path.name}.lock", wait=True):
            found = _read(path)
            if found is None:
                remove_leftovers(path)
                _write(path, decode(source, report))
                found = _read(path)
    except OSError as error:
        raise SettingError(
            "cache", str(path), f"cannot be written; {error.strerror or error}"
        ) from error
    assert found is not None
    return found


def cache_file(source: Source, name: str, cache: Path) -> Path:
    """Where the decoded data set lies, or will lie."""
    return cache / f"{name}-{source.fingerprint()}.safetensors"


def decode(source: Source, report: Report) -> Decoded:
    """Every image of the source, decoded on all cores."""
    report(0, None)  # what follows loads libraries and starts processes, for seconds
    done, total = 0, source.count()
    parts: dict[Split, tuple[Tensor, list[Any], list[Stored]]] = {}
    with _decoder(source) as decoder:
        for split in ("train", "test"):
            arrays: list[Pixels] = []
            labels: list[Any] = []
            read: list[Stored] = []
            for stored in source.read(split):
                arrays.append(_pixels(stored, decoder, arrays))
                labels += stored.labels
                read.append(stored._replace(images=[]))
                done += len(stored.labels)
                report(done, total)
            parts[split] = (_joined(arrays), labels, read)
    if not parts["train"][1] or not parts["test"][1]:
        raise SettingError("data", source.place, "holds no examples")
    _check_sizes(parts["train"][0], parts["test"][0], source)
    names = source.class_names() or _names(parts["train"][1])
    channels = max(pixels.shape[1] for pixels, _, _ in parts.values())
    train, test = (
        (_with_channels(pixels, channels), _numbers(labels, names, read))
        for pixels, labels, read in parts.values()
    )
    held = torch.bincount(train[1], minlength=len(names))
    if int(held.min()) == 0:
        missing = names[int(held.argmin())]
        raise SettingError("data", source.place, f"has no training example of class {missing!r}")
    return Decoded(train, test, names, *channel_statistics(train[0]))


def _decoder(source: Source) -> "Decoder":
    try:
        from .decoder import Decoder
    except ImportError as error:  # no pillow
        raise SettingError("data", source.place, "needs: pip install 'fedlamb[data]'") from error
    return Decoder()


def _pixels(stored: Stored, decoder: "Decoder", before: list[Pixels]) -> Pixels:
    """(examples, height, width, channels)"""
    if isinstance(stored.images, np.ndarray):
        return stored.images[..., None]
    from .decoder import DecodingError

    try:
        images = decoder.decode(stored.images)
    except DecodingError as error:
        raise SettingError(
            "data", stored.place(error.row), f"is no image that can be decoded; {error.reason}"
        ) from error
    size = before[0].shape[1:3] if before else images[0].shape[:2]
    for row, image in enumerate(images):
        if image.shape[:2] != size:
            raise SettingError(
                "data",
                stored.place(row),
                f"is {image.shape[1]}×{image.shape[0]} pixels, the images before are "
                f"{size[1]}×{size[0]}; all must have one size",
            )
    deepest = max(image.shape[2] for image in images)
    return np.stack([np.broadcast_to(image, (*size, deepest)) for image in images])


def _joined(arrays: list[Pixels]) -> Tensor:
    """(examples, channels, height, width); a grey part among coloured ones becomes coloured."""
    if not arrays:
        return torch.empty((0, 1, 1, 1), dtype=torch.uint8)
    channels = max(a.shape[3] for a in arrays)
    count = sum(len(a) for a in arrays)
    whole = np.empty((count, channels, *arrays[0].shape[1:3]), np.uint8)
    start = 0
    while arrays:  # each part is let go as soon as it is copied
        part = arrays.pop(0)
        whole[start : start + len(part)] = part.transpose(0, 3, 1, 2)
        start += len(part)
    return torch.from_numpy(whole)


def _with_channels(pixels: Tensor, channels: int) -> Tensor:
    if pixels.shape[1] == channels:
        return pixels
    return pixels.expand(-1, channels, -1, -1).contiguous()


def _check_sizes(train: Tensor, test: Tensor, source: Source) -> None:
    if train.shape[2:] != test.shape[2:]:
        raise SettingError(
            "data",
            source.place,
            f"has training images of {tuple(train.shape[2:])} and test images of "
            f"{tuple(test.shape[2:])} pixels; they must have one size",
        )


def _names(labels: Iterable[Any]) -> list[str]:
    """Names for classes that the source does not name: the labels themselves."""
    found = set(labels)
    if all(isinstance(label, int) for label in found):
        return [str(c) for c in range(max(found) + 1)]
    return sorted(str(label) for label in found)


def _numbers(labels: list[Any], names: list[str], read: list[Stored]) -> Tensor:
    """Labels from 0 on; the first that is none of the classes is told with its file and row."""
    index = {name: c for c, name in enumerate(names)}
    numbers = [label if isinstance(label, int) else index.get(str(label), -1) for label in labels]
    found = torch.tensor(numbers, dtype=torch.int64)
    bad = ((found < 0) | (found >= len(names))).nonzero()
    if len(bad):
        row = int(bad[0])
        for stored in read:
            if row < len(stored.labels):
                raise SettingError(
                    "data",
                    stored.place(row),
                    f"has label {stored.labels[row]!r}; there are {len(names)} classes, "
                    f"0 ({names[0]}) to {len(names) - 1} ({names[-1]})",
                )
            row -= len(stored.labels)
    return found


def _write(path: Path, data: Decoded) -> None:
    tensors = {
        "train images": data.train[0],
        "train labels": data.train[1],
        "test images": data.test[0],
        "test labels": data.test[1],
    }
    facts = {"names": data.names, "mean": data.mean, "std": data.std}
    with written_aside(path) as aside:
        try:
            save_file(tensors, aside, metadata={"format": _FORMAT, "facts": json.dumps(facts)})
        except SafetensorError as error:  # a full disk, for one
            raise OSError(str(error)) from error


def _read(path: Path) -> Decoded | None:
    """What the file holds; None where there is none, or a damaged one, which is made anew."""
    try:
        with safe_open(path, framework="pt") as file:
            facts = file.metadata() or {}
            if facts.get("format") != _FORMAT:
                return None
            found = json.loads(facts["facts"])
            tensor = file.get_tensor
            return Decoded(
                (tensor("train images"), tensor("train labels")),
                (tensor("test images"), tensor("test labels")),
                found["names"],
                tuple(found["mean"]),
                tuple(found["std"]),
            )
    except (OSError, SafetensorError, KeyError, ValueError):
        return None
