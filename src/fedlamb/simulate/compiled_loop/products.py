"""Large products of float32 matrices by oneDNN, in compiled programs on a CPU.

torch multiplies such matrices by MKL, which on processors other than Intel's leaves half of a wide
vector unit idle; oneDNN, which torch carries for convolutions, uses all of it. Sizes alone decide
which of them multiplies, so the same machine always gives the same bits.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from .operations import define

aten = torch.ops.aten
_LARGE = 2**20  # multiplications; with fewer, the longer way into oneDNN costs more than it saves


def by_onednn(graph: GraphModule) -> GraphModule:
    """The graph with its large products taken by oneDNN, where this torch has it."""
    if not torch.backends.mkldnn.is_available():
        return graph
    for node in list(graph.graph.nodes):
        if node.target is aten.mm.default and _fits(*node.args):
            node.target = torch.ops.fedlamb.product.default
        elif node.target is aten.addmm.default and not node.kwargs:
            added, a, b = node.args
            if _fits(a, b, added):
                node.target, node.args = torch.ops.fedlamb.product.default, (a, b, added)
    graph.recompile()
    return graph


def _fits(a: Any, b: Any, added: Any = None) -> bool:
    """Whether it is large, in float32, and what is added is a bias or as large as the product."""
    kinds = [each.meta.get("tensor_meta") for each in (a, b, added) if each is not None]
    if any(kind is None or kind.dtype != torch.float32 for kind in kinds):
        return False
    (rows, inner), (_, columns) = (kind.shape for kind in kinds[:2])
    sums = all(kind.shape in ((columns,), (rows, columns)) for kind in kinds[2:])
    return sums and rows * inner * columns >= _LARGE


def _product(a: Tensor, b: Tensor, added: Tensor | None = None) -> Tensor:
    linear: Any = torch.ops.mkldnn._linear_pointwise
    if added is not None:
        added = added.contiguous()  # of a bias, strides would be overlooked
    if added is None or added.dim() == 1:
        found: Tensor = linear.default(a, b.t(), added, "none", [], "")
    else:
        found = linear.binary(a, added, b.t(), None, "add")
    return found


def _shape(a: Tensor, b: Tensor, added: Tensor | None = None) -> Tensor:
    return a.new_empty(len(a), b.shape[1])


define("product(Tensor a, Tensor b, Tensor? added=None) -> Tensor", _product, _shape)
