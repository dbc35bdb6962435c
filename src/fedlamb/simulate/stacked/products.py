"""Products of the matrices of stacked models in graphs of operations, on a GPU by a kernel of ours.

cuBLAS multiplies float32 without tensor cores; three products of TensorFloat-32 are as exact, and
faster for matrices of small models.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from ...operations import define

aten = torch.ops.aten


def _on_gpu(a: Tensor, b: Tensor) -> Tensor:
    from .product_kernels import product

    return product(a, b)


def _shape(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty((len(a), a.shape[1], b.shape[2]))


define("stacked_product(Tensor a, Tensor b) -> Tensor", _on_gpu, _shape, ("CUDA",), any_layout=True)


def faster_products(graph: GraphModule) -> GraphModule:
    """The graph with this kernel in place of torch's, where it fits."""
    if torch.backends.cuda.matmul.allow_tf32:  # which torch's own kernels do faster
        return graph
    for node in graph.graph.nodes:
        if node.target is aten.bmm.default and all(map(_fits, node.args)):
            node.target = torch.ops.fedlamb.stacked_product.default
    graph.recompile()
    return graph


def _fits(matrices: Any) -> bool:
    found: Tensor = matrices.meta["val"]
    return found.is_cuda and found.dtype == torch.float32 and find_spec("triton") is not None
