"""Layer-wise scaling, the paper's Eq. (3): each layer moves by the same share of its own norm."""

from collections.abc import Callable, Hashable, Iterable
from typing import Literal

import torch
from torch import Tensor

from . import trees
from .trees import Scalar, Tree

Layers = Literal["tensor", "module"] | Callable[[str], Hashable]
"""What a layer is: a parameter tensor, a module (weight and bias together), or name -> group."""


def groups(names: Iterable[str], layers: Layers) -> list[list[str]]:
    """The parameter names of each layer, in the order in which they first appear."""
    if layers == "tensor":
        return [[name] for name in names]
    of = _module_of if layers == "module" else layers
    found: dict[Hashable, list[str]] = {}
    for name in names:
        found.setdefault(of(name), []).append(name)
    return list(found.values())


def layerwise_update(
    x: Tree,
    psi: Tree,
    lr: Scalar,
    weight_decay: Scalar,
    layers: Layers,
    phi_min: Scalar,
    phi_max: Scalar,
) -> Tree:
    """x[l] - lr * phi(|x[l]|) / |u| * u with u = psi[l] + weight_decay * x[l], for each layer l.

    Norms are taken before the update. A layer with u = 0 is left as it is.
    """
    decays = isinstance(weight_decay, Tensor) or weight_decay != 0
    u = trees.add_scaled(psi, weight_decay, x) if decays else psi
    members = groups(x, layers)
    ratios = trust_ratio(_norms(x, members), _norms(u, members), phi_min, phi_max)
    scales = (ratios * -lr).unbind()
    scale_of = {n: scale for names, scale in zip(members, scales, strict=True) for n in names}
    return trees.add_each_scaled(x, scale_of, u)


def trust_ratio(x_norm: Tensor, u_norm: Tensor, phi_min: Scalar, phi_max: Scalar) -> Tensor:
    """phi(|x|) / |u| with phi(z) = clip(z, phi_min, phi_max); 0 where |u| is 0."""
    phi = _clip(x_norm, phi_min, phi_max)
    return torch.where(u_norm == 0, 0, phi / u_norm)


def _clip(z: Tensor, low: Scalar, high: Scalar) -> Tensor:
    if isinstance(low, Tensor) or isinstance(high, Tensor):  # clamp takes no tensor beside a number
        low, high = torch.as_tensor(low).to(z), torch.as_tensor(high).to(z)
        return torch.minimum(torch.maximum(z, low), high)
    return torch.clamp(z, min=low, max=high)


def _norms(tree: Tree, members: list[list[str]]) -> Tensor:
    """The norm of each layer, as one vector."""
    of = trees.norms(tree)
    layers = [[of[name] for name in names] for names in members]
    return torch.stack(
        [norms[0] if len(norms) == 1 else torch.stack(norms).norm() for norms in layers]
    )


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]
