"""A pure function of tensors as one program, by torch's own compiler."""

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from ...errors import SettingError
from ...files import exclusive
from ...randomness import kept_random_state
from ...tasks.task import Task
from ...trees import laid_out_like
from ..saying import compiling
from .lists import DECOMPOSITIONS as LISTS
from .pooled_convolution import joined
from .pooling import DECOMPOSITIONS as POOLS
from .products import faster_products
from .updates import ONE_BY_ONE, inside_products

Program = Callable[..., list[Tensor]]


def compiled(function: Program, examples: Sequence[Tensor], what: str, state: int = 0) -> Program:
    """The function for tensors like the examples; says what is compiled and how long it took.

    state: so many results take the place of the first arguments, and so are laid out like them.
    """
    # To trace a random layer is to draw from the generator, in the middle of a client's round.
    with compiling(what), kept_random_state(examples[0].device):
        return _compiled(function, examples, state)


def _compiled(function: Program, examples: Sequence[Tensor], state: int) -> Program:
    on_cpu = _on_cpu(examples[0])
    # A tensor that comes twice, such as a model just received, would be traced as one.
    at = [example.data_ptr() for example in examples]
    apart = [e.clone() if at[i] in at[:i] else e for i, e in enumerate(examples)]
    if on_cpu:
        plain = make_fx(function, decomposition_table=ONE_BY_ONE)(*apart)
        traced = faster_products(joined(inside_products(plain)))
    else:
        traced = make_fx(function, decomposition_table=LISTS)(*apart)

    def same_layout(*tensors: Tensor) -> list[Tensor]:
        found = traced(*tensors)
        same = [laid_out_like(old, new) for old, new in zip(tensors, found[:state], strict=False)]
        return [*same, *found[state:]]

    try:
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        # Of several workers one compiles, and the others find its programs in the cache.
        cache = Path(cache_dir())
        with exclusive(cache / "fedlamb.lock", wait=True):
            tried = cache / f"fedlamb-{_compiler()}"
            options = _on_a_cpu(tried.exists()) if on_cpu else {}
            with torch._inductor.config.patch(options):
                graph = make_fx(same_layout, decomposition_table=POOLS if on_cpu else None)(*apart)
                program: Program = torch._inductor.compile(graph, list[Any](apart))
                program(*apart)
            if on_cpu and not tried.exists() and _takes_all_registers():
                tried.touch()
    except Exception as error:
        more = ", or install g++" if on_cpu else ""
        raise SettingError(
            "compile", True, f"does not work here; leave it off{more} ({error})"
        ) from error
    return program


def _on_a_cpu(tried: bool) -> dict[str, Any]:
    """By default a pool of processes would start up, for kernels that a CPU has none of, and each
    process would try in another one whether wide registers work with this compiler, also where
    that is known."""
    return {"compile_threads": 1, **({"cpp.vec_isa_ok": True} if tried else {})}


def _compiler() -> str:
    """Which one it is, for the name of a file."""
    found = shutil.which(os.environ.get("CXX", "g++"))
    facts = (torch.__version__, found, Path(found).stat().st_mtime_ns if found else 0)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _takes_all_registers() -> bool:
    """Whether all kinds of wide registers that this processor has passed the test."""
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list

    anew = getattr(valid_vec_isa_list, "__wrapped__", None)  # it remembers what it found
    if anew is None:
        return False
    with torch._inductor.config.patch({"cpp.vec_isa_ok": True}):
        every = anew()
    return bool(every == valid_vec_isa_list())


def load_compiler() -> None:
    """Ahead of its first use. Processes that are copied afterwards have its memory in common."""
    import torch._inductor.compile_fx  # noqa: F401


def laid_out(task: Task, tensor: Tensor) -> Tensor:
    """The one layout that programs are made for."""
    if tensor.dim() == 4 and task.channels_last:
        # contiguous() would leave one channel as it is, and what a convolution gives with it.
        return tensor.to(memory_format=torch.channels_last)
    return tensor.contiguous()


def _on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"
