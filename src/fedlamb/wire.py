"""States and messages as one flat record of named tensors, and what they weigh.

`pack` turns a NamedTuple of trees, kept trees and numbers into `{"delta/0.weight": tensor, ...}`;
`unpack` goes back and takes nothing but the names, shapes and types that it expects. Bytes are
those of the tensors; names, shapes and numbers are the transport's framing and not counted.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .algorithm import Kept
from .trees import Tree

Record = dict[str, Tensor]


class RecordError(ValueError):
    """A record that does not hold exactly what is expected."""


def pack(message: Any) -> Record:
    """One flat record: a name is the path of fields, and at its end the parameter's name."""
    record: Record = {}
    _pack(message, "", record)
    return record


def unpack(record: Mapping[str, Tensor], like: Any) -> Any:
    """The message in `record`, which must have the structure of the example `like`.

    A tree may be missing as a whole (`{}`: nothing this round), never in part.
    """
    left = dict(record)
    message = _unpack(left, like, "")
    if left:
        raise RecordError(f"unexpected in the record: {', '.join(sorted(left)[:5])}")
    return message


def nbytes(tree: Tree) -> int:
    """The bytes of a tree's tensors."""
    return sum(t.numel() * t.element_size() for t in tree.values())


def uplink_bytes(report: Any) -> int:
    """The bytes of one report."""
    return sum(nbytes(tree) for tree in report)


def downlink_bytes(sent: Any, held: Mapping[str, int]) -> int:
    """The bytes of one broadcast to a client that holds these versions of its kept trees."""
    total = 0
    for name, field in zip(sent._fields, sent, strict=True):
        if isinstance(field, Kept):
            total += nbytes(field.tree) if field.version != held.get(name, 0) else 0
        elif isinstance(field, dict):
            total += nbytes(field)
    return total


def kept_versions(sent: Any) -> dict[str, int]:
    """What a client holds after it has received this broadcast."""
    fields = zip(sent._fields, sent, strict=True)
    return {name: field.version for name, field in fields if isinstance(field, Kept)}


def _pack(part: Any, path: str, record: Record) -> None:
    if isinstance(part, Tensor):
        record[path] = part
    elif isinstance(part, dict):
        for name, tensor in part.items():
            record[f"{path}/{name}"] = tensor
    elif isinstance(part, tuple):
        for name, field in zip(part._fields, part, strict=True):  # type: ignore[attr-defined]
            _pack(field, f"{path}/{name}" if path else name, record)
    else:
        record[path] = torch.tensor(part, dtype=_NUMBERS[type(part)])


def _unpack(left: Record, like: Any, path: str) -> Any:
    if isinstance(like, Tensor):
        return _take(left, path, like)
    if isinstance(like, dict):
        if not any(f"{path}/{name}" in left for name in like):
            return {}
        return {name: _take(left, f"{path}/{name}", tensor) for name, tensor in like.items()}
    if isinstance(like, tuple):
        fields = zip(like._fields, like, strict=True)  # type: ignore[attr-defined]
        parts = [_unpack(left, part, f"{path}/{name}" if path else name) for name, part in fields]
        return type(like)(*parts)
    number = _take(left, path, torch.empty((), dtype=_NUMBERS[type(like)]))
    return type(like)(number.item())


def _take(left: Record, name: str, like: Tensor) -> Tensor:
    if name not in left:
        raise RecordError(f"missing in the record: {name}")
    tensor = left.pop(name)
    if tensor.shape != like.shape or tensor.dtype != like.dtype:
        raise RecordError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}, "
            f"expected {like.dtype} {tuple(like.shape)}"
        )
    return tensor.to(like.device)


_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
