"""Tunes the rates of the `digits` preset on the paper's grids.

    python benchmarks/tune_digits.py [--seeds 3] [--log benchmarks/logs/tune_digits.jsonl]

Every grid point is run with every seed over the preset's rounds; chosen is, as in the paper, the
point with the best mean over seeds of the best test accuracy of a run (ties: final accuracy).
No weight decay. One line per run is logged; the choice and the number of runs per method are
printed. About ten minutes on two cores.
"""

import argparse
import json
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.progress import track

from fedlamb.experiment import build_run, load_experiment

SMALL = [0.0001, 0.0003, 0.0005, 0.001, 0.003, 0.005, 0.01, 0.03, 0.05, 0.1]
LARGE = [0.001, 0.003, 0.005, 0.01, 0.03, 0.05, 0.1, 0.3, 0.5]
GRIDS: dict[str, list[dict[str, float]]] = {
    "fed-sgd": [{"lr": lr} for lr in LARGE],
    "adp-fed": [
        {"lr": lr, "server_lr": server} for lr, server in product([*SMALL, 0.3, 0.5], SMALL)
    ],
    "fed-ams": [{"lr": lr} for lr in SMALL],
    "fed-lamb": [{"lr": lr} for lr in LARGE],
    "mime": [{"lr": lr} for lr in SMALL],
    "mime-lamb": [{"lr": lr} for lr in LARGE],
}


def measure(job: tuple[str, dict[str, float], int]) -> dict[str, Any]:
    """One run."""
    method, point, seed = job
    torch.set_num_threads(1)
    changes = [f"algorithms.{method}.{key}={value}" for key, value in point.items()]
    experiment = load_experiment("digits", [f"seed={seed}", *changes])
    accuracies = [r.metrics["test_accuracy"] for r in build_run(experiment, method)]
    return {
        "method": method,
        **point,
        "seed": seed,
        "rounds": len(accuracies),
        "best_accuracy": max(accuracies),
        "final_accuracy": accuracies[-1],
    }


def main() -> None:
    """Runs the grids, writes the log, prints the choice."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--log", type=Path, default=Path("benchmarks/logs/tune_digits.jsonl"))
    options = parser.parse_args()

    jobs = [
        (method, point, seed)
        for method, grid in GRIDS.items()
        for point in grid
        for seed in range(options.seeds)
    ]
    with ProcessPoolExecutor() as pool:
        lines = list(track(pool.map(measure, jobs), total=len(jobs), description="tuning"))
    options.log.parent.mkdir(parents=True, exist_ok=True)
    options.log.write_text("".join(json.dumps(line) + "\n" for line in lines))

    for method, grid in GRIDS.items():
        scores: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for line in lines:
            if line["method"] == method:
                point = ", ".join(f"{key} = {line[key]}" for key in grid[0])
                scores[point].append((line["best_accuracy"], line["final_accuracy"]))
        ranked = {p: tuple(mean(part) for part in zip(*s, strict=True)) for p, s in scores.items()}
        best = max(ranked, key=lambda p: ranked[p])
        print(
            f"{method:10} {best:32} best {ranked[best][0]:.4f}, final {ranked[best][1]:.4f}, "
            f"n = {options.seeds} seeds, {len(grid) * options.seeds} tuning runs"
        )


if __name__ == "__main__":
    main()
