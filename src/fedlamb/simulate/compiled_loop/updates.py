"""Steps along a gradient that is a matrix product, inside the product.

W + s · (A B) as it stands writes the product, as large as the weights, and reads it again. As
`addmm` the product is added where the weights already lie.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

aten = torch.ops.aten


def _mul(tensors: list[Tensor], scale: Tensor) -> list[Tensor]:
    return [tensor * scale for tensor in tensors]


def _add(one: list[Tensor], two: list[Tensor], alpha: float = 1) -> list[Tensor]:
    return [torch.add(a, b, alpha=alpha) for a, b in zip(one, two, strict=True)]


ONE_BY_ONE: dict[Any, Any] = {aten._foreach_mul.Tensor: _mul, aten._foreach_add.List: _add}
"""For `make_fx`: the steps of a list of weights one by one; each may go into its product."""


def inside_products(graph: GraphModule) -> GraphModule:
    """The graph with such steps put into their products."""
    for node in list(graph.graph.nodes):
        if node.target is not aten.add.Tensor or node.kwargs:
            continue
        weight, step = node.args
        found = _scaled_product(step)
        if found is None or _kind(weight) != _kind(node) or _kind(found[1]) != _kind(node):
            continue
        scale, product = found
        a, b = product.args
        with graph.graph.inserting_before(node):
            if _kind(a).shape.numel() <= _kind(b).shape.numel():
                a = _scaled(graph, a, scale)
            else:
                b = _scaled(graph, b, scale)
            both = graph.graph.call_function(aten.addmm.default, (weight, a, b))
        both.meta = dict(node.meta)
        node.replace_all_uses_with(both)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _scaled(graph: GraphModule, factor: Node, scale: Node) -> Node:
    found = graph.graph.call_function(aten.mul.Tensor, (factor, scale))
    found.meta = dict(factor.meta)
    return found


def _scaled_product(node: object) -> tuple[Node, Any] | None:
    """s and the product A B, where the node is s · (A B) and nothing else needs the product."""
    if not isinstance(node, Node) or node.target is not aten.mul.Tensor or len(node.users) > 1:
        return None
    given: Any = node.args
    for scale, product in (given, given[::-1]):
        if _kind(scale).shape == ():
            turned = False
            while isinstance(product, Node) and product.target is aten.t.default:
                if len(product.users) > 1:
                    return None
                (product,), turned = product.args, not turned
            if isinstance(product, Node) and product.target is aten.mm.default:
                alone = len(product.users) == 1 and not turned
                return (scale, product) if alone else None
    return None


class _Kind(NamedTuple):
    shape: Any
    dtype: Any


def _kind(node: Any) -> _Kind:
    """Of a tensor that the graph computes or is given; of anything else, such as a constant of the
    model, nothing is known."""
    meta = node.meta.get("tensor_meta") if isinstance(node, Node) else None
    return _Kind(None, None) if meta is None else _Kind(meta.shape, meta.dtype)
