"""Checkpoints: one safetensors file, written aside and renamed, so that it is whole or absent."""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .errors import SettingError
from .files import written_aside

_FORMAT = "fedlamb-checkpoint/2"


def save_checkpoint(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Writes tensors and JSON-able facts; a crash at any moment leaves the old file or the new."""
    seen: set[int] = set()
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        # A file holds each tensor by itself, even where two share memory.
        stored[name] = (tensor.contiguous() if place not in seen else _copy(tensor)).cpu()
        seen.add(place)
    text = json.dumps(facts)
    metadata = {"format": _FORMAT, "facts": text, "checksum": _checksum(stored, text)}
    if not path.parent.is_dir() or path.is_dir():
        raise SettingError("checkpoint", str(path), "must be a file in a folder that exists")
    with written_aside(path) as aside:
        try:
            save_file(stored, aside, metadata=metadata)
        except SafetensorError as error:  # a full disk, for one
            raise OSError(f"{path} cannot be written; {error}") from error


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and facts of a checkpoint."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise SettingError("checkpoint", str(path), f"must be a {_FORMAT} file")
            # Copies, which lie in memory as all other tensors do: in the file they begin anywhere,
            # and where a matrix begins decides the last bits of some of its products.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise SettingError("checkpoint", str(path), f"cannot be read; {error}") from error
    text = metadata["facts"]
    if metadata["checksum"] != _checksum(tensors, text):
        raise SettingError("checkpoint", str(path), "is damaged: its checksum does not fit")
    return tensors, json.loads(text)


def _checksum(tensors: Mapping[str, Tensor], text: str) -> str:
    """Of everything in a file; finds bytes that a disk or a copy has changed."""
    found = zlib.crc32(text.encode())
    for name in sorted(tensors):
        found = zlib.crc32(name.encode(), found)
        found = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, found)
    return f"{found:08x}"


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
