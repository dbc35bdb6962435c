"""fedlamb beside plain loops and other simulators, on the same federated MNIST (Linux only).

    python benchmarks/simulators.py [--data-root FOLDER] [--only NAME,NAME] [--workload W1,W2]
                                    [--repeats 3] [--rounds N] [--log FILE]

50 clients of 1,200 images, 25 a round, one local epoch of batches of 128, SGD at 0.1, the plain
mean of the models, then the test accuracy on all 10,000 images. W1 is the MLP 784-200-10, W2 the
CNN of 21,840 parameters. What each contestant's script had to add to its library, and where a
library does otherwise, stands at the top of the script, in `peers/`.

Libraries go into environments of their own, made once, with the exact versions below. All
contestants are run in turn, one at a time, `--repeats` times over; the first round of each run is
left out. A contestant that fails is named with the reason, and the others go on. Memory is the
largest sum of the proportional set sizes of a run's processes, looked at every half second. What a
contestant leaves in its temporary folder, such as programs it has compiled, is there in its later
runs, as on anybody's machine; so the memory of its first run stands apart.
"""

import argparse
import json
import os
import platform
import re
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import numpy as np
import torch

import fedlamb as fl
from fedlamb.reproduce.results import revision

HERE = Path(__file__).resolve().parent
TORCH = ["torch==2.13.0"]
ENVIRONMENTS: dict[str, list[list[str]]] = {
    "pfl": [TORCH, ["pfl==0.6.0", "numpy==2.4.6"]],
    "fedjax": [
        [
            "fedjax==0.0.17",
            "jax==0.4.30",
            "jaxlib==0.4.30",
            "dm-haiku==0.0.12",
            "optax==0.2.2",
            "chex==0.1.87",
            "flax==0.10.4",
            "numpy==1.26.4",
            "scipy==1.13.1",
        ]
    ],
    "flower": [TORCH, ["flwr[simulation]==1.41.0", "ray==2.55.1", "numpy==2.4.6"]],
    "fedlab": [
        TORCH,
        [
            "munch==4.0.0",
            "numpy==2.4.6",
            "pandas==3.1.1",
            "pillow==13.0.0",
            "pynvml==13.0.1",
            "scikit-learn==1.9.1",
            "tqdm==4.70.1",
        ],
        ["--no-deps", "fedlab==1.3.0"],
    ],
}
"""What pip is given, call by call; FedLab without torchvision, which it does not need here."""

ROUNDS = {"W1": 11, "W2": 5}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


class Contestant(NamedTuple):
    """A script in `peers/` and how it is run."""

    script: str
    environment: str | None = None
    """None: the one that runs this benchmark, in which fedlamb is."""
    launcher: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    variables: dict[str, str] = {}  # noqa: RUF012 - never changed
    workloads: tuple[str, ...] = ("W1", "W2")


OURS = "fedlamb"
CONTESTANTS = {
    OURS: Contestant("ours.py", options=("--workers", "2", "--compile", "1")),
    "fedlamb-plain": Contestant("ours.py", options=("--workers", "2", "--compile", "0")),
    "floor": Contestant("floor.py", workloads=("W1",)),
    "vmap": Contestant("vmap_by_hand.py"),
    "plain": Contestant("plain_loop.py"),
    "dataloader": Contestant("dataloader_loop.py"),
    "pfl": Contestant("pfl_peer.py", "pfl", launcher=TORCHRUN, variables=ONE_THREAD),
    "fedjax": Contestant("fedjax_peer.py", "fedjax"),
    "flower": Contestant("flower_peer.py", "flower"),
    "fedlab": Contestant("fedlab_peer.py", "fedlab"),
}


class FailedError(Exception):
    """A contestant gave no result; the message says why."""


def prepare_environment(name: str, folder: Path) -> Path:
    """The Python of a contestant's environment, which is made where it is not there as pinned."""
    place, steps = folder / name, ENVIRONMENTS[name]
    python, ready = place / "bin" / "python", place / "ready.json"
    if ready.exists() and json.loads(ready.read_text()) == steps:
        return python
    say(f"making the environment of {name} (once, some minutes)")
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in (
        [sys.executable, "-m", "venv", "--clear", place],
        *([*install, *step] for step in steps),
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise FailedError(f"no environment: {reason(done.stderr)}")
    ready.write_text(json.dumps(steps))
    return python


def write_data(folder: Path, root: Path | None) -> Path:
    """MNIST as one npz, which is returned, and as IDX files in `idx/` beside it."""
    data = fl.load_dataset("mnist", root=root)
    arrays = {}
    (folder / "idx").mkdir()
    for suffix, file, (images, labels) in (("", "train", data.train), ("t", "t10k", data.test)):
        x = images.numpy().reshape(-1, 28, 28).astype(np.uint8)
        y = labels.numpy().astype(np.uint8)
        arrays |= {f"x{suffix}": x, f"y{suffix}": y}
        for kind, values in (("images-idx3", x), ("labels-idx1", y)):
            header = struct.pack(f">{1 + values.ndim}i", 0x0800 + values.ndim, *values.shape)
            (folder / "idx" / f"{file}-{kind}-ubyte").write_bytes(header + values.tobytes())
    np.savez(folder / "mnist.npz", **arrays)
    return folder / "mnist.npz"


class Tree:
    """A process and all its descendants, also those that outlive their parents."""

    def __init__(self, root: int) -> None:
        self.members = {root: ""}
        """Process ids, each with its time of start."""
        self.peak = 0
        """Bytes"""

    def look(self) -> None:
        """Finds new members and adds up the memory of those alive."""
        there = _processes()
        self.members = {
            pid: there[pid][1]
            for pid, begun in self.members.items()
            if pid in there and begun in ("", there[pid][1])
        }
        grown = True
        while grown:
            more = {p: s for p, (parent, s) in there.items() if parent in self.members}
            grown = not more.keys() <= self.members.keys()
            self.members |= more
        self.peak = max(self.peak, sum(map(_proportional_size, self.members)))

    def kill(self) -> None:
        """Ends those still there."""
        self.look()
        for pid in self.members:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def _processes() -> dict[int, tuple[int, str]]:
    """The parent and the time of start of every process."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                found[int(entry.name)] = (int(fields[1]), fields[19])
    return found


def _proportional_size(pid: int) -> int:
    """Bytes: pages shared by n processes count 1/n in each."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def measure(
    contestant: Contestant,
    python: Path,
    workload: str,
    rounds: int,
    data: Path,
    kept: Path,
    limit: float,
) -> dict[str, Any]:
    """One run: what the script reports, seconds from start to end, and peak memory in bytes.

    kept: where its temporary files lie.
    """
    kept.mkdir(parents=True, exist_ok=True)
    variables = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    if contestant.environment is not None:
        variables.pop("PYTHONPATH", None)
    options = ["--workload", workload, "--rounds", str(rounds), "--data", str(data)]
    script = HERE / "peers" / contestant.script
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        out, errors = Path(folder, "out"), Path(folder, "errors")
        with out.open("w") as stdout, errors.open("w") as stderr:
            process = subprocess.Popen(
                [python, *contestant.launcher, script, *options, *contestant.options],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                cwd=folder,
                env=variables | contestant.variables | {"TMPDIR": str(kept)},
            )
        tree, begun = Tree(process.pid), time.monotonic()
        try:
            while process.poll() is None:
                if time.monotonic() - begun > limit:
                    raise FailedError(f"took more than {limit:.0f} s")
                tree.look()
                time.sleep(0.5)
            whole = time.monotonic() - begun
        finally:
            tree.kill()
            process.wait()
        if process.returncode != 0:
            raise FailedError(reason(errors.read_text()))
        try:
            result: dict[str, Any] = json.loads(out.read_text().splitlines()[-1])
        except (IndexError, json.JSONDecodeError) as error:
            raise FailedError("ended without its line of results") from error
    return {**result, "whole_run": whole, "peak_bytes": tree.peak}


def reason(errors: str) -> str:
    """The line of a process's errors that says most, without the folders of this machine."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    named = [line for line in lines if re.search(r"(Error|Exception|ERROR)\b.*:", line)]
    line = (named or lines or ["no word of why"])[-1]
    return re.sub(r"(/[^\s/:'\"]+)+/", "", line)[:200]


def table(runs: Sequence[dict[str, Any]], workload: str) -> list[str]:
    """Lines of a Markdown table, fastest first; those that failed last, with the reason."""
    pooled: dict[str, list[dict[str, Any]]] = {}
    failed: dict[str, str] = {}
    for run in runs:
        if run["workload"] != workload:
            continue
        if "error" in run:
            failed[run["name"]] = run["error"]
        else:
            pooled.setdefault(run["name"], []).append(run)
    seconds = {n: [s for run in found for s in run["seconds"][1:]] for n, found in pooled.items()}
    ours = median(seconds[OURS]) if OURS in seconds else None
    lines = [
        f"| {workload} | seconds per round | quartiles | to ours | accuracy | peak memory of the "
        "first run | of later runs |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in sorted(pooled, key=lambda name: median(seconds[name])):
        middle = median(seconds[name])
        low, _, high = quantiles(seconds[name], n=4) if len(seconds[name]) > 1 else [middle] * 3
        last = [run["accuracy"][-1] for run in pooled[name] if run["accuracy"]]
        first = [run["peak_bytes"] for run in pooled[name] if run["repeat"] == 0]
        later = [run["peak_bytes"] for run in pooled[name] if run["repeat"] > 0]
        cells = [
            name + (f" ({failed[name]} in other runs)" if name in failed else ""),
            f"{middle:.3f}",
            f"{low:.3f} to {high:.3f}",
            f"{middle / ours:.2f}" if ours else "",
            f"{median(last):.4f}" if last else "",
            *(f"{max(peaks) / 2**20:,.0f} MiB" if peaks else "" for peaks in (first, later)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [f"| {n} | failed: {why} | | | | | |" for n, why in failed.items() if n not in pooled]
    return lines


def processor() -> str:
    """As the system calls it; its family tells processors of one name apart."""
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    known = {name.strip(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    names = ("model name", "cpu family", "model")
    return ", ".join(f"{name} {known[name]}" for name in names if name in known)


def say(line: str) -> None:
    """Progress, at once."""
    print(line, file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    """The options, with names checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def names(known: Sequence[str]) -> Any:
        def parsed(text: str) -> list[str]:
            found = text.split(",")
            for name in found:
                if name not in known:
                    raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
            return found

        return parsed

    parser.add_argument("--data-root", type=Path, help="the folder that holds mnist/")
    parser.add_argument("--only", type=names(list(CONTESTANTS)), default=list(CONTESTANTS))
    parser.add_argument("--workload", type=names(list(ROUNDS)), default=list(ROUNDS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, help=f"at least 2; by default {ROUNDS}")
    parser.add_argument("--limit", type=float, default=1800, help="seconds for one run")
    parser.add_argument("--environments", type=Path, default=HERE / ".environments")
    parser.add_argument("--log", type=Path, default=HERE / "logs" / "simulators.json")
    args = parser.parse_args()
    if args.rounds is not None and args.rounds < 2:
        parser.error("--rounds must be at least 2: the first is left out")
    return args


def main() -> None:
    """Makes what is missing, runs all in turn, prints the tables and writes the log."""
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # with what it had started
    pythons: dict[str | None, Path | FailedError] = {None: Path(sys.executable)}
    for name in args.only:
        environment = CONTESTANTS[name].environment
        if environment is not None and environment not in pythons:
            try:
                pythons[environment] = prepare_environment(environment, args.environments.resolve())
            except FailedError as error:
                pythons[environment] = error
    turns = [
        (repeat, workload, name)
        for repeat in range(args.repeats)
        for workload in args.workload
        for name in args.only
        if workload in CONTESTANTS[name].workloads
    ]
    runs: list[dict[str, Any]] = []
    log = {
        "options": {k: getattr(args, k) for k in ("only", "workload", "repeats", "rounds")},
        "machine": {
            "system": platform.platform(),
            "cores": os.cpu_count(),
            "processor": processor(),
            "vectors": torch.backends.cpu.get_cpu_capability(),
        },
        "python": platform.python_version(),
        "revision": revision(),
        "environments": ENVIRONMENTS,
        "runs": runs,
    }
    with tempfile.TemporaryDirectory() as folder:
        data = write_data(Path(folder), args.data_root)
        for turn, (repeat, workload, name) in enumerate(turns, start=1):
            contestant = CONTESTANTS[name]
            rounds = args.rounds or ROUNDS[workload]
            try:
                python = pythons[contestant.environment]
                if isinstance(python, FailedError):
                    raise python
                kept = Path(folder, "kept", name, workload)
                found = measure(contestant, python, workload, rounds, data, kept, args.limit)
                line = f"{median(found['seconds'][1:]):.3f} s per round"
            except FailedError as error:
                found, line = {"error": str(error)}, f"failed: {error}"
            say(f"{turn}/{len(turns)} {workload} {name}: {line}")
            runs.append({"workload": workload, "name": name, "repeat": repeat, **found})
            args.log.parent.mkdir(parents=True, exist_ok=True)
            args.log.write_text(json.dumps(log, indent=1) + "\n")
    for workload in args.workload:
        print(*table(runs, workload), "", sep="\n")


if __name__ == "__main__":
    main()
