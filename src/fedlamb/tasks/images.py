"""Images on the device: uint8 in memory, normalised and augmented a batch at a time."""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

DRAWS = 3  # whole numbers that decide one example's crop (down, right) and flip


@dataclass(frozen=True)
class Images:
    """Normalisation by mean and standard deviation of each channel, in units of 0 … 255.

    In training, where `crop` is above 0: padded by that many zero pixels on each side, cropped
    back at random and flipped left to right for every second example, as its draws decide.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop: int = 0

    def prepared(self, images: Tensor, draws: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Normalised; where `draws` (examples, DRAWS) are given, first cropped and flipped."""
        if draws is not None and self.crop > 0:
            images = _crop_and_flip(images, draws, self.crop)
        shift, scale = _shift_and_scale(self, dtype, images.device)
        return images.to(dtype, copy=True).mul_(scale).add_(shift)


@lru_cache(maxsize=8)
def _shift_and_scale(
    images: Images, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(x - mean) / std as shift + scale * x, one number for each channel."""
    std = torch.tensor(images.std, dtype=torch.float64).view(-1, 1, 1)
    mean = torch.tensor(images.mean, dtype=torch.float64).view(-1, 1, 1)
    return (-mean / std).to(device, dtype), (1 / std).to(device, dtype)


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, exact: from a histogram of the 256 values."""
    values = torch.arange(256, dtype=torch.float64)
    means, deviations = [], []
    for channel in range(images.shape[1]):
        counts = torch.zeros(256, dtype=torch.float64)
        for part in torch.split(images[:, channel], 4096):
            counts += torch.bincount(part.flatten().int(), minlength=256)
        mean = (counts * values).sum() / counts.sum()
        means.append(float(mean))
        deviations.append(float(((counts * (values - mean) ** 2).sum() / counts.sum()).sqrt()))
    return tuple(means), tuple(deviations)


def _crop_and_flip(images: Tensor, draws: Tensor, width: int) -> Tensor:
    n, channels, height, across = images.shape
    down, right = draws[:, 0] % (2 * width + 1), draws[:, 1] % (2 * width + 1)
    flip = (draws[:, 2] % 2).bool()
    rows = torch.arange(height, device=images.device) + down[:, None]
    columns = torch.arange(across, device=images.device).expand(n, -1)
    columns = torch.where(flip[:, None], across - 1 - columns, columns) + right[:, None]
    padded = pad(images, (width, width, width, width))
    picked = padded.gather(2, rows[:, None, :, None].expand(-1, channels, -1, padded.shape[3]))
    return picked.gather(3, columns[:, None, None, :].expand(-1, channels, height, -1))


class Batch(NamedTuple):
    """Rows of the training data, and what decides how they are seen."""

    rows: Tensor
    draws: Tensor | None = None
    """How each is augmented, where it is."""
    key: Tensor | None = None
    """What random layers depend on, in a local step."""
    weights: Tensor | None = None
    """The share of each row in the mean; None: all alike. Rows that only pad have 0."""
