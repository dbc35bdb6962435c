"""The generators that random layers draw from, borrowed and given back as they were."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def kept_random_state(device: torch.device) -> Iterator[torch.Generator]:
    """A block after which the generators for this device and for the CPU are as before; gives the
    device's."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    states = [generator.get_state() for generator in generators]
    try:
        yield generators[-1]
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


@contextmanager
def own_random_state(device: torch.device, seed: int = 0) -> Iterator[torch.Generator]:
    """The generator for this device under a seed of one's own; the global state is restored."""
    with kept_random_state(device) as generator:
        generator.manual_seed(seed)
        yield generator
