"""Operations of our own, which torch's compiler calls as they are."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

_library: Any = torch.library.Library("fedlamb", "FRAGMENT")  # type: ignore[no-untyped-call]


def define(
    schema: str,
    function: Callable[..., Any],
    shapes: Callable[..., Any],
    devices: Sequence[str] = ("CPU",),
) -> None:
    """Makes `torch.ops.fedlamb.NAME`; `shapes` gives results without their values."""
    name = schema.partition("(")[0]
    _library.define(schema)
    for device in devices:
        _library.impl(name, function, device)
    torch.library.register_fake(f"fedlamb::{name}", shapes, lib=_library)
