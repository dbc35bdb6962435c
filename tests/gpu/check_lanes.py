"""Clients side by side leave the same bits as clients one after another. To be run on a GPU.

ResNet-18, bf16, compiled, 4 rounds of `benchmarks/gpu.py`'s workload: one lane, six lanes, and six
lanes whose graphs are all recorded on one stream, as up to revision 5197aea. cuDNN is held to its
deterministic kernels, so that two runs can be compared at all.
"""

import sys
import time
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import fedlamb as fl
import gpu
from fedlamb.simulate import cuda_graph
from fedlamb.simulate.loop import _Lane

ROUNDS = 4


def after(first: fl.Run, lanes: int, one_stream: bool) -> dict[str, Tensor]:
    """The model after some rounds."""
    record = cuda_graph._Graph.record
    common = torch.cuda.Stream()
    if one_stream:
        cuda_graph._Graph.record = lambda program, tensors, structure, stream: record(
            program, tensors, structure, common
        )
    run = fl.fit(
        first.algorithm, first.task, clients=first.plan.clients, rounds=ROUNDS, batch_size=128,
        executor="loop", compile=True,
    )  # fmt: skip
    run._executor.gradients = first._executor.gradients  # the model is compiled once
    run._executor._lanes = [_Lane(first.task.device) for _ in range(lanes)]
    list(run)
    cuda_graph._Graph.record = record
    return {name: value.clone() for name, value in run.params.items()}


def main() -> None:
    torch.backends.cudnn.deterministic = True
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    first = gpu.federation("resnet18", "loop", compile=True)
    expected = after(first, 1, False)
    differs = False
    for lanes, one_stream in ((1, False), (6, False), (6, False), (6, True), (6, True)):
        begun = time.perf_counter()
        found = after(first, lanes, one_stream)
        differ = [name for name in found if not torch.equal(found[name], expected[name])]
        said = f"differ in {len(differ)}, first {differ[:3]}" if differ else "the same bits"
        how = "on one stream" if one_stream else "on their own streams"
        print(f"{lanes} lanes recorded {how}: {said} ({time.perf_counter() - begun:.1f} s)")
        differs |= bool(differ) and not one_stream
    sys.exit(int(differs))


if __name__ == "__main__":
    main()
