"""The large products of W1's local step by both libraries that torch carries for a CPU.

    python benchmarks/products.py [--repeats 60]

`forward` is a batch of 128 images times the weights of 784 inputs and 200 outputs, with the bias;
`step` is the gradient of these weights, added to them. By MKL, as torch takes products, and by
oneDNN, as `fedlamb.tasks.linear` takes them where that is faster. In turn, on one thread; medians
over the repeats of ten calls each.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from simulators import processor
from torch import Tensor

from fedlamb.reproduce.results import revision
from fedlamb.tasks import linear

ROWS, INPUTS, OUTPUTS, CALLS = 128, 784, 200, 10


def main() -> None:
    """Measures, prints and writes the log."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=60)
    log = Path(__file__).resolve().parent / "logs" / "products.json"
    parser.add_argument("--log", type=Path, default=log)
    args = parser.parse_args()
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    x, weight, bias = normal(ROWS, INPUTS), normal(OUTPUTS, INPUTS), normal(OUTPUTS)
    dy = normal(ROWS, OUTPUTS).t()  # as a backward pass has it
    ways: dict[str, Callable[[], Tensor]] = {
        "forward, MKL": lambda: torch.addmm(bias, x, weight.t()),
        "forward, oneDNN": lambda: linear.product(x, weight.t(), bias),
        "step, MKL": lambda: torch.addmm(weight, dy, x),
        "step, oneDNN": lambda: linear.product(dy, x, weight),
    }
    microseconds: dict[str, list[float]] = {name: [] for name in ways}
    with torch.no_grad():
        for _ in range(args.repeats):
            for name, way in ways.items():
                way()
                begun = time.perf_counter()
                for _ in range(CALLS):
                    way()
                each = (time.perf_counter() - begun) / CALLS
                microseconds[name].append(round(1e6 * each, 1))
    vectors = torch.backends.cpu.get_cpu_capability()
    for name, found in microseconds.items():
        low, _, high = quantiles(found, n=4)
        print(f"{name:16} {median(found):6.0f} microseconds ({low:.0f} to {high:.0f})")
    print("fedlamb takes", "oneDNN" if linear._IS_FASTER else "MKL")
    machine = {"processor": processor(), "vectors": vectors, "torch": torch.__version__}
    args.log.write_text(
        json.dumps(
            {
                "machine": machine,
                "revision": revision(),
                "oneDNN": linear._IS_FASTER,
                "microseconds": microseconds,
            }
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
