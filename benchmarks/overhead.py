"""What the loop executor adds to the bare forward and backward passes of the same batches.

    python benchmarks/overhead.py [--repeats 15] [--clients 10] [--log FILE]

MNIST-sized, as in the paper: the MLP 784-200-10, 2,400 rows per client, one epoch of 19 steps of
128. `bare` picks the batch's rows from the training data and runs forward and backward of the
model as torch has it, nothing else; `onednn` does so with the linear layers that the loop has in
their place; `ready` is `onednn` on batches that lie ready in memory. All are run in turn, in one
process; reported is the median over the repeats of the ratio to the bare passes, and to `onednn`,
of the same turn.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import nn

import fedlamb as fl
from fedlamb.reproduce.results import revision

ALGORITHMS = {
    "fed-sgd": fl.FedSGD(lr=0.1),
    "adp-fed": fl.AdpFed(lr=0.1, server_lr=0.01),
    "fed-ams": fl.FedAMS(lr=0.001),
    "fed-lamb": fl.FedLAMB(lr=0.01),
    "mime": fl.Mime(lr=0.001),
    "mime-lamb": fl.MimeLAMB(lr=0.01),
}
LIMITS = {"fed-sgd": 1.15, "fed-lamb": 1.60}


def bare(task: fl.Task, model: nn.Module, batches: list[torch.Tensor]) -> Callable[[], None]:
    """Picks the rows of every batch; forward and backward on one model."""
    x, y = task.train
    parameters = list(model.parameters())

    def passes() -> None:
        for rows in batches:
            loss = task.loss(model(x.index_select(0, rows)), y.index_select(0, rows))
            torch.autograd.grad(loss, parameters)

    return passes


def ready(task: fl.Task, batches: list[torch.Tensor]) -> Callable[[], None]:
    """The same on batches that were picked before."""
    model, (x, y) = task.model.train(), task.train
    parameters = list(model.parameters())
    picked = [(x[rows], y[rows]) for rows in batches]

    def passes() -> None:
        for inputs, targets in picked:
            torch.autograd.grad(task.loss(model(inputs), targets), parameters)

    return passes


def main() -> None:
    """Measures, prints a table, and writes the log."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--log", type=Path)
    options = parser.parse_args()

    draw = torch.Generator().manual_seed(0)
    rows = 2400 * options.clients
    data = torch.randn(rows, 784, generator=draw), torch.randint(10, (rows,), generator=draw)
    model = fl.mlp(784, [200], 10)
    task = fl.Task(model, train=data, test=data)
    clients = fl.iid(rows, options.clients)
    runs = {name: fl.fit(a, task, clients=clients, rounds=10**6) for name, a in ALGORITHMS.items()}
    plan = next(iter(runs.values())).plan
    same = [batch for client in plan.cohort(2) for batch in plan.batches(2, client)]

    def executor(run: fl.Run) -> Callable[[], None]:
        # Round 2 and its broadcast: the steady state, in which v_hat divides.
        next(run)
        sent = run.algorithm.broadcast(run.server)
        return lambda: run._executor.run(2, sent, run.buffers, lambda done, cohort: None) and None

    jobs = {
        "bare": bare(task, model, same),
        "onednn": bare(task, task.model.train(), same),
        "ready": ready(task, same),
        **{name: executor(run) for name, run in runs.items()},
    }
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(options.repeats + 2):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            if turn >= 2:
                seconds[name].append(time.perf_counter() - start)

    result: dict[str, Any] = {
        "machine": platform.machine(),
        "revision": revision(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "repeats": options.repeats,
        "steps": len(same),
        "bare_microseconds_per_step": round(median(seconds["bare"]) / len(same) * 1e6, 1),
        "ratio_to_bare": {},
        "ratio_to_onednn": {},
    }
    print(f"{len(same)} steps, {options.repeats} repeats, {torch.get_num_threads()} threads")
    for to, name in product(("bare", "onednn"), jobs):
        if name == to:
            continue
        ratios = [a / b for a, b in zip(seconds[name], seconds[to], strict=True)]
        low, mid, high = quantiles(ratios, n=4)
        limit = LIMITS.get(name) if to == "bare" else None
        result[f"ratio_to_{to}"][name] = {
            "median": round(mid, 3),
            "quartiles": [round(low, 3), round(high, 3)],
            "limit": limit,
        }
        print(
            f"{name:10} {mid:.3f} of {to} ({low:.3f} to {high:.3f})"
            + (f", limit {limit:.2f}" if limit else "")
        )
    if options.log:
        options.log.parent.mkdir(parents=True, exist_ok=True)
        options.log.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
