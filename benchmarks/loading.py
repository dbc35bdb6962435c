"""First and second load of the four image sets: seconds and peak memory, each in a new process.

    python benchmarks/loading.py --data-root DATA

A first load decodes every image into an empty cache; a second one maps the decoded file and, so
that its pages count, sums all pixels. Writes benchmarks/logs/loading.json.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from fedlamb.reproduce.results import revision

SETS = ("mnist", "fashion_mnist", "cifar10", "tiny_imagenet")
LOAD = """
import json, resource, sys, time
import fedlamb as fl
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
data = fl.load_dataset(sys.argv[1], root=sys.argv[2])
seconds = time.perf_counter() - start
pixels = sum(int(part.sum()) for part in data.train[0].split(1000))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"seconds": seconds, "peak_MiB": peak / 1024, "before_MiB": before / 1024,
                  "train": len(data.train[1]), "test": len(data.test[1]), "sum": pixels}))
"""


def load(name: str, root: str, cache: str) -> dict[str, float]:
    """One load in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD, name, root],
        env={**os.environ, "XDG_CACHE_HOME": cache},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def main() -> None:
    """Runs all loads, prints a line for each, writes the log."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--data-root", required=True)
    arguments.add_argument("--repeats", type=int, default=3)
    given = arguments.parse_args()
    found = []
    for number in range(given.repeats):
        for name in SETS:
            with tempfile.TemporaryDirectory() as cache:
                first, second = (load(name, given.data_root, cache) for _ in range(2))
                kept = sum(p.stat().st_size for p in Path(cache).rglob("*.safetensors"))
            assert first["sum"] == second["sum"]
            found.append({"set": name, "repeat": number, "first": first, "second": second})
            print(
                f"{name:14} first {first['seconds']:6.2f} s {first['peak_MiB']:6.0f} MiB"
                f"   second {second['seconds']:6.3f} s {second['peak_MiB']:6.0f} MiB"
                f"   cache {kept / 1e6:6.1f} MB",
                flush=True,
            )
    log = {
        "command": f"python benchmarks/loading.py --data-root DATA --repeats {given.repeats}",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "python": platform.python_version(),
        "revision": revision(),
        "loads": found,
    }
    path = Path(__file__).parent / "logs/loading.json"
    path.write_text(json.dumps(log, indent=1) + "\n")


if __name__ == "__main__":
    main()
