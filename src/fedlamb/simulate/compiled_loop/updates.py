"""Steps along a gradient that is a matrix product, inside the product.

W + s · (A B) as it stands writes the product, as large as the weights, and reads it again. As
`addmm` the product is added where the weights already lie.
"""

from typing import Any

import torch
from torch.fx import GraphModule, Node

aten = torch.ops.aten


def inside_products(graph: GraphModule) -> GraphModule:
    """The graph with such steps put into their products."""
    for node in list(graph.graph.nodes):
        if node.target is not aten.add.Tensor or node.kwargs:
            continue
        weight, step = node.args
        found = _scaled_product(step)
        if found is None or not isinstance(weight, Node) or _shape(weight) != _shape(node):
            continue
        scale, (a, b) = found
        with graph.graph.inserting_before(node):
            if _shape(a).numel() <= _shape(b).numel():
                a = graph.graph.call_function(aten.mul.Tensor, (a, scale))
            else:
                b = graph.graph.call_function(aten.mul.Tensor, (b, scale))
            both = graph.graph.call_function(aten.addmm.default, (weight, a, b))
        node.replace_all_uses_with(both)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _scaled_product(node: object) -> tuple[Node, Any] | None:
    """s and (A, B), where the node is s · (A B) and nothing else needs what lies between."""
    if not isinstance(node, Node) or node.target is not aten.mul.Tensor or len(node.users) > 1:
        return None
    given: Any = node.args
    for scale, product in (given, given[::-1]):
        if isinstance(scale, Node) and not _shape(scale):
            turned = False
            while isinstance(product, Node) and product.target is aten.t.default:
                if len(product.users) > 1:
                    return None
                (product,), turned = product.args, not turned
            if isinstance(product, Node) and product.target is aten.mm.default:
                alone = len(product.users) == 1 and not turned
                return (scale, product.args) if alone else None
    return None


def _shape(node: Node) -> torch.Size:
    shape: torch.Size = node.meta["tensor_meta"].shape
    return shape
