"""What a crew says goes through NCCL, and runs on several GPUs are those on one.

The first part needs one GPU: NCCL takes the kinds of tensors that a crew sends. (It takes no two
processes on one GPU.) The second part needs two GPUs, and says so where there is one.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from fedlamb.simulate import crew

RUN = ("run", "-m", "fed-lamb", "-s", "federation.rounds=10", "--device", "cuda")


def check_messages() -> None:
    """A group of one process, which a crew takes for several, sums to what that process has."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "RANK": "0"}
    dist.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device("cuda", 0))
    crew._groups.append(dist.new_group())
    alone = crew.Crew(0, 2)
    device = torch.device("cuda", 0)
    draw = torch.Generator(device).manual_seed(0)
    part = {
        "float32": torch.randn(3, 4, device=device, generator=draw),
        "number": torch.tensor(2.5, device=device),
    }
    mean = alone.mean(part, 3.0)
    assert all(torch.allclose(mean[name], part[name]) for name in part)
    counters = {"batches": torch.tensor(7, device=device)}
    assert alone.largest(counters) == counters
    total = alone.total({"loss": torch.tensor(0.5, device=device, dtype=torch.float64)})
    assert float(total["loss"]) == 0.5
    assert alone.agreed(True, device)
    assert not alone.agreed(False, device)
    assert alone.told("a folder, ü") == "a folder, ü"
    crew.leave()
    print("messages through NCCL: as sent")


def losses(folder: str, *options: str) -> list[float]:
    """Of the rounds of one run."""
    command = [sys.executable, "-m", "fedlamb", *RUN, *options, "--out", folder]
    subprocess.run(command, check=True)
    (metrics,) = Path(folder).rglob("metrics.jsonl")
    return [json.loads(line)["train_loss"] for line in metrics.read_text().splitlines()]


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {torch.cuda.nccl.version()}")
    check_messages()
    if torch.cuda.device_count() < 2:
        print("one GPU: runs on two are not checked")
        return
    with tempfile.TemporaryDirectory() as folder:
        one, two = losses(f"{folder}/1"), losses(f"{folder}/2", "--workers", "2")
    worst = max(abs(a - b) / a for a, b in zip(one, two, strict=True))
    print(f"two GPUs against one, 10 rounds of Fed-LAMB on digits: {worst:.1e}")
    assert worst < 1e-4, worst


if __name__ == "__main__":
    main()
