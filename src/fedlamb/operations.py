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
    """Makes `torch.ops.fedlamb.NAME`; `shapes` gives results without their values. The function
    must take its tensors however they are laid out: else the compiler would copy some of them."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.flexible_layout,))
    for device in devices:
        _library.impl(name, function, device)
    torch.library.register_fake(f"fedlamb::{name}", shapes, lib=_library)
