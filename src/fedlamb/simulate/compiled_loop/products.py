"""Large products in graphs of operations taken as `tasks.linear` takes them."""

from typing import Any

import torch
from torch.fx import GraphModule

from ...tasks.linear import by_onednn, product

aten = torch.ops.aten


def faster_products(graph: GraphModule) -> GraphModule:
    """The graph with these products in place of torch's own."""
    for node in list(graph.graph.nodes):
        if node.target is aten.mm.default and _fits(*node.args):
            node.target = product
        elif node.target is aten.addmm.default and not node.kwargs:
            added, a, b = node.args
            if _fits(a, b, added):
                node.target, node.args = product, (a, b, added)
    graph.recompile()
    return graph


def _fits(a: Any, b: Any, added: Any = None) -> bool:
    """Whether it is taken so, and what is added is a bias or as large as the product."""
    kinds = [each.meta.get("tensor_meta") for each in (a, b, added) if each is not None]
    if None in kinds:
        return False
    (rows, inner), (_, columns) = (kind.shape for kind in kinds[:2])
    sums = all(kind.shape in ((columns,), (rows, columns)) for kind in kinds[2:])
    return sums and by_onednn(kinds[0].dtype, rows, inner, columns)
