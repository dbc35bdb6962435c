"""One process of a crew, for `test_distributed.py`: runs every method and, at rank 0, writes it."""

import json
import sys

import torch

import fedlamb as fl
from problems import Small
from test_executors import METHODS, image_run, with_batch_norm


def main() -> None:
    torch.set_num_threads(1)
    found = {}
    for name, method in METHODS.items():
        for sizes in ((6, 6, 6, 6, 6), (7, 4, 9, 1, 12)):
            for executor in ("loop", "vectorised"):
                small = Small(sizes=sizes, rounds=10)
                run = small.fit(method, executor=executor, fraction=0.4, weighting="examples")
                key = f"{name} {sizes[0]} {executor}"
                found[key] = trajectory(run)
    found["batch norm"] = trajectory(image_run(METHODS["mime"], "loop", with_batch_norm))
    if run.crew.leads:
        print(json.dumps(found), file=sys.stdout)


def trajectory(run: fl.Run) -> list:
    rounds = [[r.clients, r.metrics, r.uplink_bytes, r.downlink_bytes] for r in run]
    return [*rounds, {n: p.flatten().tolist() for n, p in {**run.params, **run.buffers}.items()}]


if __name__ == "__main__":
    main()
