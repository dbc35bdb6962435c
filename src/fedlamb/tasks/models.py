"""Models by name. Each is built under its own seed, without touching the global generator."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from ..randomness import own_random_state


def mlp(inputs: int, hidden: Sequence[int], outputs: int, seed: int = 0) -> nn.Sequential:
    """A multi-layer perceptron with ReLU between its layers; inputs of any shape are flattened.

    The start is drawn under `seed`, whatever the global generator holds.
    """
    sizes = [inputs, *hidden, outputs]
    with own_random_state(torch.device("cpu"), seed):
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in pairwise(sizes):
            layers += [nn.Linear(before, after), nn.ReLU()]
        return nn.Sequential(*layers[:-1])
