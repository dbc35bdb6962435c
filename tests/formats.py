"""Tiny data sets that the tests write themselves, in each format that is read."""

import gzip
import io
import struct
from pathlib import Path

import datasets
import numpy as np
from PIL import Image

NAMES = ["cat", "dog", "owl"]


def pictures(count: int, channels: int = 1, size: int = 6, seed: int = 0) -> np.ndarray:
    shape = (count, size, size) if channels == 1 else (count, size, size, channels)
    return np.random.default_rng(seed).integers(256, size=shape, dtype=np.uint8)


def encoded(picture: np.ndarray, kind: str = "PNG") -> bytes:
    data = io.BytesIO()
    Image.fromarray(picture).save(data, kind)
    return data.getvalue()


def write_parquet(
    folder: Path,
    images: dict[str, list[bytes]],
    labels: dict[str, list[int]],
    column: str = "image",
    names: list[str] | None = NAMES,
    **more: list[object],
) -> Path:
    """As the hub serves it; `images` and `labels` by file stem, such as train-00000-of-00001."""
    folder.mkdir(parents=True, exist_ok=True)
    for stem, data in images.items():
        columns = {column: [{"bytes": d, "path": None} for d in data], "label": labels[stem]}
        features = datasets.Features(
            {
                column: datasets.Image(),
                "label": datasets.ClassLabel(names=names) if names else datasets.Value("int64"),
                **{name: datasets.Value("string") for name in more},
            }
        )
        extra = {name: values[: len(data)] for name, values in more.items()}
        table = datasets.Dataset.from_dict({**columns, **extra}, features=features)
        table.to_parquet(folder / f"{stem}.parquet")
    return folder


def write_image_folder(folder: Path, train: np.ndarray, test: np.ndarray) -> Path:
    for split, images in (("train", train), ("test", test)):
        for i, image in enumerate(images):
            place = folder / split / NAMES[i % 3]
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{i:03}.png").write_bytes(encoded(image))
    return folder


def idx(array: np.ndarray) -> bytes:
    head = struct.pack(f">I{array.ndim}I", 0x0800 + array.ndim, *array.shape)
    return head + array.astype(np.uint8).tobytes()


def write_idx(
    folder: Path, train: np.ndarray, test: np.ndarray, zipped: bool = False, dots: bool = False
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for prefix, images in (("train", train), ("t10k", test)):
        for part, array in (("images-idx3", images), ("labels-idx1", np.arange(len(images)) % 3)):
            name = f"{prefix}-{part.replace('-', '.') if dots else part}-ubyte"
            data = idx(array)
            path = folder / (f"{name}.gz" if zipped else name)
            path.write_bytes(gzip.compress(data) if zipped else data)
    return folder
