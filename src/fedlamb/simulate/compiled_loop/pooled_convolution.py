"""A first convolution and the 2 × 2 max-pooling behind it as one operation, in C++.

Between the two lies the largest tensor of a small network, of which pooling drops three quarters.
Made together, it is never written, and the gradient of the weights needs only what was kept. In
graphs of operations `joined` puts the one in place of the two, where the input of the convolution
needs no gradient.
"""

import ctypes
from functools import cache
from operator import getitem
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ...operations import define
from .pooling import is_plain

aten = torch.ops.aten
_FLAGS = ("-O2", "-ffp-contract=fast")  # of what torch's compiler passes, the last counts


def joined(graph: GraphModule) -> GraphModule:
    """The graph with the operation in it, wherever it can stand."""
    for node in list(graph.graph.nodes):
        if node.target is aten.max_pool2d_with_indices.default:
            _join(graph.graph, node)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _join(graph: Graph, pool: Any) -> None:
    convolution = pool.args[0]
    if not (is_plain(*pool.args[1:]) and _fits(convolution)):
        return
    x, weight, bias, _, (padding, _), *_ = convolution.args
    back = [node for node in convolution.users if node is not pool]
    places = [user for part in pool.users if part.args[1] == 1 for user in part.users]
    ends: list[Any] = [end for node in back for end in node.users]
    if not all(map(_is_of_pool, [*back, *places])) or not all(map(_is_of_weights, ends)):
        return
    operations = torch.ops.fedlamb
    with graph.inserting_before(pool):
        forward = operations.pooled_convolution.default
        y, place = _pair(graph, forward, (x, weight, bias, padding))
    _replace(pool, [y, place])
    for end in ends:
        dy = end.args[0].args[0]
        with graph.inserting_before(end):
            backward = operations.pooled_convolution_backward.default
            dweight, dbias = _pair(graph, backward, (dy, place, x, weight, padding))
        _replace(end, [None, dweight, dbias])


def _pair(graph: Graph, operation: Any, arguments: tuple[Any, ...]) -> list[Node]:
    both = graph.call_function(operation, arguments)
    return [graph.call_function(getitem, (both, i)) for i in range(2)]


def _replace(node: Any, parts: list[Any]) -> None:
    for user in list(node.users):  # each takes one part
        if user.users:
            user.replace_all_uses_with(parts[user.args[1]])


def _fits(node: Any) -> bool:
    if not isinstance(node, Node) or node.target is not aten.convolution.default:
        return False
    given: Any = node.args
    _, weight, _, stride, padding, dilation, transposed, _, groups = given
    sizes, meta = weight.meta.get("tensor_meta"), node.meta["tensor_meta"]
    if sizes is None or [*stride, *dilation, groups, transposed] != [1, 1, 1, 1, 1, False]:
        return False
    out, channels, *kernel = sizes.shape
    return (
        padding[0] == padding[-1]
        and kernel[0] == kernel[-1] <= _KERNEL
        and channels <= _IN
        and out <= _OUT
        and meta.dtype in _TYPES
        and meta.shape[3] * meta.dtype.itemsize <= _ROW
    )


def _is_of_pool(node: Node) -> bool:
    return node.target is aten.max_pool2d_with_indices_backward.default


def _is_of_weights(node: Any) -> bool:
    """Whether it is a gradient of a convolution's weights alone, not of what came in."""
    return node.target is aten.convolution_backward.default and not node.args[10][0]


_IN, _OUT = 3, 16  # channels at most: of more, torch's own convolution is as fast
_KERNEL, _ROW = 11, 512  # side of the window and bytes of a row that comes out, at most
_TYPES = {torch.float32: "float", torch.float64: "double"}


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> tuple[Tensor, Tensor]:
    y, place = _shapes(x, weight, bias, padding)
    start = weight.new_zeros(len(weight)) if bias is None else bias.contiguous()
    _call("forward", x, weight, padding, weight.contiguous(), start, y, place)
    return y, place


def _backward(
    dy: Tensor, place: Tensor, x: Tensor, weight: Tensor, padding: int
) -> tuple[Tensor, Tensor]:
    found, bias = _gradients(dy, place, x, weight, padding)
    channels_last = (t.contiguous(memory_format=torch.channels_last) for t in (dy, place))
    _call("backward", x, weight, padding, *channels_last, found, bias)
    return found, bias


def _shapes(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> tuple[Tensor, Tensor]:
    sides = ((side + 2 * padding - weight.shape[2] + 1) // 2 for side in x.shape[2:])
    y = x.new_empty(len(x), len(weight), *sides).to(memory_format=torch.channels_last)
    return y, torch.empty_like(y, dtype=torch.uint8)


def _call(name: str, x: Tensor, weight: Tensor, padding: int, *tensors: Tensor) -> None:
    library = _library(_TYPES[x.dtype], *x.shape[1:], *weight.shape[::3], padding)
    strides = (ctypes.c_int64 * 4)(*x.stride())
    pointers = (ctypes.c_void_p(t.data_ptr()) for t in tensors)
    counts = ctypes.c_int64(len(x)), ctypes.c_int64(torch.get_num_threads())
    getattr(library, name)(*counts, ctypes.c_void_p(x.data_ptr()), strides, *pointers)


@cache
def _library(*given: Any) -> ctypes.CDLL:
    """The operation for one type and these sizes."""
    from torch._inductor.codecache import CppCodeCache

    names = "REAL", "IN", "HEIGHT", "WIDTH", "OUT", "KERNEL", "PADDING"
    sizes = "".join(f"#define {n} {g}\n" for n, g in zip(names, given, strict=True))
    source = Path(__file__).with_suffix(".cpp").read_text()
    found: ctypes.CDLL = CppCodeCache.load(sizes + source, extra_flags=_FLAGS)
    return found


def _gradients(dy: Tensor, place: Tensor, x: Tensor, weight: Tensor, padding: int) -> Any:
    return weight.new_empty(weight.shape), weight.new_empty(len(weight))


define(
    "pooled_convolution(Tensor x, Tensor weight, Tensor? bias, int padding) -> (Tensor, Tensor)",
    _forward,
    _shapes,
)
define(
    "pooled_convolution_backward(Tensor dy, Tensor place, Tensor x, Tensor weight, int padding)"
    " -> (Tensor, Tensor)",
    _backward,
    _gradients,
)
