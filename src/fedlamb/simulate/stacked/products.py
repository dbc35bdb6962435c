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


def with_stacked_products(graph: GraphModule) -> GraphModule:
    """The graph with this kernel in place of torch's, where it fits."""
    products = [node for node in graph.graph.nodes if node.target is aten.bmm.default]
    for node in products:
        if all(map(_fits, node.args)):
            node.target = torch.ops.fedlamb.stacked_product.default
    graph.recompile()
    return graph


def _fits(matrices: Any) -> bool:
    found: Tensor = matrices.meta["val"]
    return (
        found.is_cuda
        and found.dtype == torch.float32
        and find_spec("triton") is not None
        and torch.version.hip is None
        and torch.cuda.get_device_capability(found.device) >= (8, 0)  # with TensorFloat-32
        and not _one_is_enough()
    )


def _one_is_enough() -> bool:
    """Whether one product of TensorFloat-32 is allowed, which torch's own kernels do faster."""
    setting: Any = torch.backends.cuda.matmul
    try:
        allowed: bool = setting.allow_tf32
    except RuntimeError:  # set through torch's newer interface, beside which this is not read
        return bool(setting.fp32_precision == "tf32")
    return allowed
