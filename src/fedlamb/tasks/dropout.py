"""Dropout that depends on a key alone: the same masks in a loop, vectorised, on any device.

torch's own dropout draws from a generator, and how much of it each call takes differs between
devices and under vmap. Here a mask is a hash of (key, layer, position), so that a client's round
is the same wherever it is run.
"""

import torch
from torch import Tensor, nn

_FEATURES = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)  # these drop whole channels


class KeyedDropout(nn.Module):
    """Zeroes shares of its inputs in training mode, by the key that its buffer holds."""

    key: Tensor

    def __init__(self, p: float, whole_channels: bool, number: int) -> None:
        super().__init__()
        self.p, self.whole_channels, self.number = p, whole_channels, number
        self.calls = 0
        """In this step so far; a second one has a mask of its own. A new step sets it to 0."""
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        shape = x.shape[:2] if self.whole_channels else x.shape
        number = self.number + self.calls * _CALLS
        self.calls += 1
        bits = _hash(self.key + _wrapped(number * _ODD), shape.numel(), x.device)
        kept = (bits >= round(self.p * 2**31)).reshape(shape)
        kept = kept.reshape(*shape, *[1] * (x.dim() - len(shape)))
        return x * kept.to(x.dtype) / (1 - self.p) if self.p < 1 else x * 0

    def extra_repr(self) -> str:
        return f"p={self.p}, whole_channels={self.whole_channels}"


def with_keyed_dropout(model: nn.Module) -> nn.Module:
    """The same module with every `nn.Dropout` in it replaced; changes it in place."""
    everywhere = model.named_modules(remove_duplicate=False)
    found = [(path, m) for path, m in everywhere if type(m) in (nn.Dropout, *_FEATURES)]
    for number, (path, module) in enumerate(found):
        parent, _, name = path.rpartition(".")
        keyed = KeyedDropout(module.p, isinstance(module, _FEATURES), number)
        keyed.train(module.training)
        if not path:
            return keyed
        setattr(model.get_submodule(parent), name, keyed)
    return model


def keyed_layers(model: nn.Module) -> dict[str, KeyedDropout]:
    """Under the name of the buffer that takes the key of a local step."""
    return {
        f"{path}.key" if path else "key": module
        for path, module in model.named_modules()
        if isinstance(module, KeyedDropout)
    }


_CALLS = 1_000_003  # no model has so many layers
_ODD = 0x9E3779B97F4A7C15 - 2**64  # as a signed number; products wrap around
_MIX = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)  # of splitmix64


def _hash(key: Tensor, count: int, device: torch.device) -> Tensor:
    """`count` numbers of 31 random bits: splitmix64 of the key and the position."""
    # The key comes first: a compiler may take positions alone for 32-bit numbers.
    z = (key.to(device) + torch.arange(count, device=device)) * _ODD
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _MIX[0]
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _MIX[1]
    return ((z ^ ((z >> 31) & (2**33 - 1))) >> 33) & (2**31 - 1)


def _wrapped(number: int) -> int:
    """As a signed number of 64 bits."""
    return (number + 2**63) % 2**64 - 2**63
