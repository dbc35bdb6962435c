"""Programs traced once for each shape of their inputs and compiled by `torch.compile`."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from ..randomness import kept_random_state
from .nested import Structure, tree_flatten, tree_unflatten
from .saying import compiling
from .stacked.pooled import JoinedPools
from .stacked.products import with_stacked_products


class Compiled:
    """Runs pure functions on trees of tensors; the first call for a shape takes seconds."""

    def __init__(self) -> None:
        self._known: dict[Any, _Program] = {}

    def __call__(self, key: Any, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function gives; `key` tells apart functions that differ otherwise."""
        leaves, structure = tree_flatten(arguments)
        whole = (key, structure, tuple((t.shape, t.dtype) for t in leaves))
        program = self._known.get(whole)
        if program is None or not program.takes(leaves):
            with compiling("a local step"), kept_random_state(leaves[0].device):
                program = self._known[whole] = _compile(function, leaves, structure)
                program(leaves)
        return program(leaves)


class _Program(NamedTuple):
    run: Callable[..., Any]
    whole: list[bool]
    """Whether it takes all of an input, or once what is the same along some axes."""
    kept: list[int | None]
    """The input that an output is, where the function hands it on as it is."""
    of: Structure

    def takes(self, leaves: Sequence[Tensor]) -> bool:
        return all(w or _repeated(t) for w, t in zip(self.whole, leaves, strict=True))

    def __call__(self, leaves: Sequence[Tensor]) -> Any:
        pairs = zip(self.whole, leaves, strict=True)
        # Views that share memory, such as a model sent to all, would be compiled as what they are.
        found = self.run(*[(t if whole else _once(t)).contiguous() for whole, t in pairs])
        rest = iter(found)
        return tree_unflatten([next(rest) if k is None else leaves[k] for k in self.kept], self.of)


def _compile(
    function: Callable[..., Any], leaves: Sequence[Tensor], structure: Structure
) -> _Program:
    of: list[Structure] = []

    def flat(*given: Tensor) -> list[Tensor]:
        found, spec = tree_flatten(function(*tree_unflatten(given, structure)))
        of.append(spec)
        return found

    # Traced first: the result is a plain list of operations, without vmap and without trees.
    with JoinedPools():
        tensors = [leaf.contiguous() for leaf in leaves]
        traced = make_fx(flat, decomposition_table=_IN_STAGES)(*tensors)
    kept = _handed_on(traced)
    # Of what stays as it is and is the same for all clients, such as a divisor that all are sent,
    # one is enough to read.
    whole = [n not in kept or not _repeated(leaf) for n, leaf in enumerate(leaves)]
    for node, all_of_it in zip(traced.graph.find_nodes(op="placeholder"), whole, strict=True):
        if not all_of_it:
            _repeat(node)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    traced = with_stacked_products(traced)
    # On a GPU, small kernels of several layers that could run side by side become one.
    options: dict[str, Any] = {"combo_kernels": True} if tensors[0].is_cuda else {}
    return _Program(torch.compile(traced, dynamic=False, options=options), whole, kept, of[0])


def _handed_on(traced: GraphModule) -> list[int | None]:
    """For each output the input that it is, if any; the graph then gives the others alone."""
    inputs = {node: n for n, node in enumerate(traced.graph.find_nodes(op="placeholder"))}
    (output,) = traced.graph.find_nodes(op="output")
    (found,) = output.args
    output.args = ([node for node in found if node not in inputs],)
    return [inputs.get(node) for node in found]


def _repeat(node: Node) -> None:
    """Has the graph take this input once and repeat it."""
    with node.graph.inserting_after(node):
        shape = [*node.meta["val"].shape]
        again = node.graph.call_function(torch.ops.aten.expand.default, (node, shape))
        again.meta = dict(node.meta)
    node.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)


def _repeated(tensor: Tensor) -> bool:
    return any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True))


def _once(tensor: Tensor) -> Tensor:
    for axis, step in enumerate(tensor.stride()):
        tensor = tensor.narrow(axis, 0, 1) if step == 0 and tensor.shape[axis] > 1 else tensor
    return tensor


def _norm(
    x: Tensor,
    ord: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """A norm over several axes, first over the last of them: these sums are taken by the loop that
    makes the numbers, while cutting the whole into parts of equal size would need another."""
    axes = sorted(a % x.dim() for a in (range(x.dim()) if dim is None else dim))
    if ord != 2 or len(axes) < 2 or keepdim or dtype is not None or not x.is_floating_point():
        return NotImplemented
    return (x * x).sum(axes[-1]).sum(axes[:-1]).sqrt()


_IN_STAGES = {torch.ops.aten.linalg_vector_norm.default: _norm}
