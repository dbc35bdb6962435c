"""The workload that all contestants share: data, clients, cohorts, and the line they report.

NumPy only, so that every contestant's environment can import it.
"""

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

CLIENTS, COHORT, BATCH, LR = 50, 25, 128, 0.1
SEED = 0


class Data(NamedTuple):
    """MNIST, normalised by mean and standard deviation of the training set."""

    x: NDArray[np.float32]
    """(60000, 1, 28, 28)"""
    y: NDArray[np.int64]
    xt: NDArray[np.float32]
    yt: NDArray[np.int64]


def arguments(*more: str) -> argparse.Namespace:
    """The options of every contestant; `more` are whole numbers of one alone, such as --workers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=("W1", "W2"), required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--data", type=Path, required=True, help="npz with uint8 x, y, xt, yt")
    for option in more:
        parser.add_argument(option, type=int, required=True)
    return parser.parse_args()


def load(path: Path) -> Data:
    """Normalised once, before the first round: no contestant but ours pays for it in a round."""
    with np.load(path, allow_pickle=False) as stored:
        x, y, xt, yt = (stored[name] for name in ("x", "y", "xt", "yt"))
    mean, std = x.mean(dtype=np.float64), x.std(dtype=np.float64)

    def prepared(images: NDArray[np.uint8]) -> NDArray[np.float32]:
        scaled = (images.astype(np.float32) - np.float32(mean)) / np.float32(std)
        return scaled.reshape(-1, 1, 28, 28)

    return Data(prepared(x), y.astype(np.int64), prepared(xt), yt.astype(np.int64))


def shards(examples: int) -> list[NDArray[np.int64]]:
    """The rows of each client: a random split into equal parts."""
    return np.split(np.random.default_rng(SEED).permutation(examples), CLIENTS)


def cohort(draw: np.random.Generator) -> list[int]:
    """25 of the 50 clients."""
    return draw.choice(CLIENTS, COHORT, replace=False).tolist()


def report(seconds: list[float], accuracy: list[float], **more: Any) -> None:
    """The contestant's last line of output."""
    print(json.dumps({"seconds": seconds, "accuracy": accuracy, **more}), flush=True)
