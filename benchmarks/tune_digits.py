"""Tunes the rates of the `digits` preset on the paper's grids.

    python benchmarks/tune_digits.py [--seeds 3] [--log benchmarks/logs/tune_digits.jsonl]
    python benchmarks/tune_digits.py --show    # the table again, from the log alone

Every grid point is run with every seed over the preset's rounds; chosen is, as in the paper, the
point with the best mean over seeds of the best test accuracy of a run (ties: final accuracy).
No weight decay. One line per run is logged; the table has mean and sample standard deviation
over the seeds. About six minutes on two cores.
"""

import argparse
import json
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from rich.progress import track

from fedlamb.experiment import build_run
from fedlamb.reproduce.panels import PAPER
from fedlamb.settings import load_experiment

GRIDS: dict[str, list[dict[str, float]]] = {
    method: [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    for method, grid in PAPER.items()
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


def tune(seeds: int) -> list[dict[str, Any]]:
    """All runs of all grids."""
    jobs = [
        (method, point, seed)
        for method, grid in GRIDS.items()
        for point in grid
        for seed in range(seeds)
    ]
    with ProcessPoolExecutor() as pool:
        return list(track(pool.map(measure, jobs), total=len(jobs), description="tuning"))


def show(lines: list[dict[str, Any]]) -> None:
    """The chosen point of each method."""
    print("| method | chosen | best accuracy | final accuracy | seeds | tuning runs |")
    print("| --- | --- | --- | --- | --- | --- |")
    for method, grid in GRIDS.items():
        runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for line in lines:
            if line["method"] == method:
                runs[", ".join(f"{key} = {line[key]}" for key in grid[0])].append(line)
        parts = ("best_accuracy", "final_accuracy")
        score = {point: [mean(r[part] for r in of) for part in parts] for point, of in runs.items()}
        chosen = max(score, key=lambda point: score[point])
        cells = [
            f"{100 * mean(values):.1f} ± {100 * stdev(values):.1f} %"
            for values in ([r[part] for r in runs[chosen]] for part in parts)
        ]
        tried = sum(len(of) for of in runs.values())
        print(f"| {method} | {chosen} | {' | '.join(cells)} | {len(runs[chosen])} | {tried} |")


def main() -> None:
    """Runs the grids and writes the log, or reads it; prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--log", type=Path, default=Path("benchmarks/logs/tune_digits.jsonl"))
    parser.add_argument("--show", action="store_true", help="only print the table of the log")
    options = parser.parse_args()
    if not options.show:
        lines = tune(options.seeds)
        options.log.parent.mkdir(parents=True, exist_ok=True)
        options.log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    show([json.loads(line) for line in options.log.read_text().splitlines()])


if __name__ == "__main__":
    main()
