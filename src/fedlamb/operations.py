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
    any_layout: bool = False,
) -> None:
    """Makes `torch.ops.fedlamb.NAME`; `shapes` gives results without their values.

    any_layout: the compiler may lay out its tensors as it likes, which saves copies.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.flexible_layout,) if any_layout else ())
    for device in devices:
        _library.impl(name, function, device)
    torch.library.register_fake(f"fedlamb::{name}", shapes, lib=_library)
