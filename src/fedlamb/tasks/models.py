"""Models by name. Each is built under its own seed, without touching the global generator.

A builder takes (shape of one input, number of classes) and gives an `nn.Module`. One's own comes
by import path: `my.module:build`.
"""

import importlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from ..errors import SettingError, unknown_name
from ..randomness import own_random_state

Builder = Callable[..., nn.Module]
Norm = Literal["batch", "group"]


def mlp(inputs: int, hidden: Sequence[int], outputs: int, seed: int = 0) -> nn.Sequential:
    """A multi-layer perceptron with ReLU between its layers; inputs of any shape are flattened.

    The start is drawn under `seed`, whatever the global generator holds.
    """
    if isinstance(hidden, int):
        raise SettingError("hidden", hidden, f"must be a list of widths, such as [{hidden}]")
    sizes = [inputs, *hidden, outputs]
    with own_random_state(torch.device("cpu"), seed):
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in pairwise(sizes):
            layers += [nn.Linear(before, after), nn.ReLU()]
        return nn.Sequential(*layers[:-1])


class CNN(nn.Module):
    """The paper's small network: two convolutions and two linear layers (28×28: p = 21,840)."""

    def __init__(self, shape: tuple[int, int, int] = (1, 28, 28), classes: int = 10) -> None:
        super().__init__()
        channels, height, across = shape
        if min(height, across) < 16:
            raise SettingError("model.name", "cnn", f"needs 16×16 pixels, not {height}×{across}")
        features = 20 * _after_cnn(height) * _after_cnn(across)
        self.conv1 = nn.Conv2d(channels, 10, 5)
        self.conv2 = nn.Conv2d(10, 20, 5)
        self.drop2 = nn.Dropout2d()
        self.fc1 = nn.Linear(features, 50)
        self.drop1 = nn.Dropout()
        self.fc2 = nn.Linear(50, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.drop2(self.conv2(x)), 2))
        x = self.drop1(F.relu(self.fc1(x.flatten(1))))
        logits: Tensor = self.fc2(x)
        return logits


def _after_cnn(side: int) -> int:
    """Pixels left of one side after two 5×5 convolutions, each with a 2×2 pool."""
    return ((side - 4) // 2 - 4) // 2


class ResNet18(nn.Module):
    """ResNet-18 with the 3×3 stem for small images; batch norm, or group norm with 32 groups."""

    def __init__(self, channels: int = 3, classes: int = 10, norm: Norm = "batch") -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        self.norm = _norm(64, norm)
        widths = (64, 64, 128, 128, 256, 256, 512, 512)
        self.blocks = nn.Sequential(
            *(_Block(a, b, norm) for a, b in zip((64, *widths), widths, strict=False))
        )
        self.fc = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.conv(x))))
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits


class _Block(nn.Module):
    """Two 3×3 convolutions beside a shortcut; halves the image where it widens."""

    def __init__(self, before: int, after: int, norm: Norm) -> None:
        super().__init__()
        self.stride = stride = 1 if before == after else 2
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = _norm(after, norm)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = _norm(after, norm)
        self.shortcut = (
            nn.Identity()
            if stride == 1
            else nn.Sequential(nn.Conv2d(before, after, 1, bias=False), _norm(after, norm))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        # Every second pixel picked first: a GPU takes 2 to 10 times as long for a 1×1 stride.
        kept = x[:, :, :: self.stride, :: self.stride]
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(kept))


def _norm(width: int, norm: Norm) -> nn.Module:
    return nn.BatchNorm2d(width) if norm == "batch" else nn.GroupNorm(32, width)


class ViT(nn.Module):
    """A small vision transformer: 4×4 patches (8×8 from 64 pixels on), 6 blocks of width 192."""

    def __init__(self, shape: tuple[int, int, int], classes: int = 10, width: int = 192) -> None:
        super().__init__()
        channels, height, across = shape
        patch = 8 if height >= 64 else 4
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        count = (height // patch) * (across // patch)
        self.position = nn.Parameter(0.02 * torch.randn(1, count, width))
        self.blocks = nn.Sequential(*(_Attention(width, heads=3) for _ in range(6)))
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.position
        logits: Tensor = self.fc(self.norm(self.blocks(x)).mean(dim=1))
        return logits


class _Attention(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = (
            part.view(n, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, length, width)
        x = x + self.out(mixed)
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


def build_model(
    name: str,
    shape: tuple[int, ...],
    classes: int,
    *,
    hidden: Sequence[int] = (200,),
    norm: Norm = "batch",
    seed: int = 0,
) -> nn.Module:
    """The model of that name for inputs of this shape; `hidden` is the MLP's, `norm` ResNet's."""
    if name == "mlp":
        return mlp(prod(shape), hidden, classes, seed)
    builders: dict[str, Callable[[], nn.Module]] = {
        "cnn": lambda: CNN(_image(name, shape), classes),
        "resnet18": lambda: ResNet18(_image(name, shape)[0], classes, norm),
        "vit": lambda: ViT(_image(name, shape), classes),
    }
    own = None if name in builders else _own(name, ["mlp", *builders])
    with own_random_state(torch.device("cpu"), seed):
        if own is None:
            return builders[name]()
        try:
            model = own(shape, classes)
        except Exception as error:
            raise SettingError(
                "model.name", name, f"must take (shape, classes), here {shape}, {classes}; {error}"
            ) from error
    if not isinstance(model, nn.Module):
        raise SettingError("model.name", name, f"must return an nn.Module, not {type(model)}")
    return model


def _image(name: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
    if len(shape) != 3:
        raise SettingError(
            "model.name", name, f"needs images (channels, height, width), not {shape}"
        )
    return shape[0], shape[1], shape[2]


def _own(name: str, known: Sequence[str]) -> Builder:
    module, colon, function = name.partition(":")
    if not colon:
        raise unknown_name("model.name", name, [*known, "or my.module:build"])
    try:
        builder: Builder = getattr(importlib.import_module(module), function)
    except Exception as error:
        raise SettingError("model.name", name, f"cannot be imported; {error}") from error
    return builder
