"""fedlamb through its command line, as a user runs it.

Reads the IDX files that lie beside the npz in `idx/`, keeps images as uint8 and normalises each
batch in the round, which the other contestants do once before the first round. The seconds are
those of the run folder's metrics.jsonl: training, mean and test pass, as with the others, but not
the line of metrics and the checkpoint that are written after each round, which none of the others
write.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import workload

SETTINGS = """\
[data]
name = {folder}

[split]
kind = "iid"
clients = 50

[model]
name = "{model}"

[federation]
rounds = {rounds}
fraction = 0.5
batch_size = 128

[algorithms.fed-sgd]
lr = 0.1
"""


def main() -> None:
    """Runs the command in a temporary folder and reports what its metrics say."""
    args = workload.arguments("--workers", "--compile")
    with tempfile.TemporaryDirectory() as folder:
        settings, out = Path(folder, "settings.toml"), Path(folder, "run")
        settings.write_text(
            SETTINGS.format(
                folder=json.dumps(str(args.data.resolve().parent / "idx")),
                model={"W1": "mlp", "W2": "cnn"}[args.workload],
                rounds=args.rounds,
            )
        )
        command = ["run", "-p", settings, "--workers", str(args.workers), "--device", "cpu"]
        command += ["-s", f"engine.compile={str(bool(args.compile)).lower()}"]
        subprocess.run(
            [sys.executable, "-m", "fedlamb", *command, "--out", out],
            check=True,
            env={**os.environ, "XDG_CACHE_HOME": str(args.data.resolve().parent / "cache")},
        )
        (metrics,) = out.rglob("metrics.jsonl")
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    workload.report([r["seconds"] for r in lines], [r["test_accuracy"] for r in lines])


if __name__ == "__main__":
    main()
