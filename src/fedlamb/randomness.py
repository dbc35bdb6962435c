"""The generators that random layers draw from, borrowed and given back as they were."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


def kept_random_state(device: torch.device) -> AbstractContextManager[None]:
    """A block after which the generator for this device is as before."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


@contextmanager
def own_random_state(device: torch.device, seed: int = 0) -> Iterator[torch.Generator]:
    """The generator for this device under a seed of one's own; the global state is restored."""
    on_gpu = device.type == "cuda"
    with kept_random_state(device):
        index = device.index if device.index is not None else 0
        generator = torch.cuda.default_generators[index] if on_gpu else torch.default_generator
        generator.manual_seed(seed)
        yield generator
