"""A million clients, 100 a round: time per round and memory beside a thousand clients.

    python benchmarks/population.py [--log benchmarks/logs/population.json]

Fed-LAMB, an MLP 784-50-10 with momentum kept for every client that ever took part; every client
holds 20 of 60,000 random images. Each population in a process of its own, interleaved.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from fedlamb.records import environment
from fedlamb.reproduce.results import revision

ONE = """
import json, resource, sys
import torch
import fedlamb as fl
from fedlamb.tasks.partition import Rows
n, rounds = int(sys.argv[1]), int(sys.argv[2])
draw = torch.Generator().manual_seed(0)
x = torch.randint(256, (60000, 1, 28, 28), generator=draw, dtype=torch.uint8)
y = torch.randint(10, (60000,), generator=draw)
task = fl.Task(fl.mlp(784, [50], 10), (x, y), (x[:1000], y[:1000]),
               inputs=fl.Images((128.0,), (74.0,)))
clients = Rows(torch.arange(20 * n) % 60000, torch.full((n,), 20))
run = fl.fit(fl.FedLAMB(lr=0.001), task, clients=clients, fraction=100 / n, rounds=rounds)
seconds = [r.seconds for r in run]
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(json.dumps({"n": n, "seconds": seconds[5:], "peak_GiB": peak, "states": len(run.store)}))
"""


def main() -> None:
    """Runs both populations, prints and logs them."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=60)
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--log", type=Path)
    given = arguments.parse_args()
    found = []
    for _ in range(given.repeats):
        for n in (1_000, 1_000_000):
            done = subprocess.run(
                [sys.executable, "-c", ONE, str(n), str(given.rounds)],
                capture_output=True,
                text=True,
                check=True,
            )
            found.append(json.loads(done.stdout))
            last = found[-1]
            print(
                f"n = {n:>9,}: {1e3 * statistics.median(last['seconds']):.1f} ms a round, peak "
                f"{last['peak_GiB']:.2f} GiB, {last['states']:,} states kept",
                flush=True,
            )
    few, many = (
        statistics.median(s for f in found if f["n"] == n for s in f["seconds"])
        for n in (1_000, 1_000_000)
    )
    print(f"ratio of the medians: {many / few:.3f}")
    if given.log:
        facts = {"environment": environment(), "revision": revision()}
        log = {**facts, "rounds": given.rounds, "ratio": many / few, "runs": found}
        given.log.write_text(json.dumps(log, indent=1) + "\n")


if __name__ == "__main__":
    main()
