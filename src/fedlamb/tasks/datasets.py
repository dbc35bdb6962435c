"""Data sets by name."""

from importlib.resources import files
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load
from torch import Tensor


class Dataset(NamedTuple):
    """Training and test examples, ready for a model."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    classes: int


def digits() -> Dataset:
    """Handwritten digits, embedded: 1,797 real grey images of 8×8 pixels, in [0, 1].

    1,437 for training and 360 for testing, by a fixed shuffle. These are scikit-learn's digits
    (Alpaydin, Kaynak: Optical Recognition of Handwritten Digits, UCI, CC BY 4.0).
    """
    stored = load(files(__package__).joinpath("digits.safetensors").read_bytes())
    order = torch.from_numpy(np.random.default_rng(0).permutation(1797))
    x, y = stored["images"][order].float().unsqueeze(1) / 16, stored["labels"][order].long()
    return Dataset((x[:1437], y[:1437]), (x[1437:], y[1437:]), classes=10)


DATASETS = {"digits": digits}
"""Name in the settings -> function that loads the set."""
