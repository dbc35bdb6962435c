"""On a machine with a GPU: the same trajectory as on the CPU, and resume to the same bits.

    PYTHONPATH=src python tests/gpu/check_cuda.py [fed-lamb ...]

Not collected by pytest. Exits with 1 where something does not hold.
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import fedlamb as fl

METHODS = {
    "fed-sgd": fl.FedSGD(lr=0.3),
    "adp-fed": fl.AdpFed(lr=0.1, server_lr=0.03),
    "fed-ams": fl.FedAMS(lr=0.01),
    "fed-lamb": fl.FedLAMB(lr=0.03, weight_decay=0.01, sync_every=2),
    "mime": fl.Mime(lr=0.0005),
    "mime-lamb": fl.MimeLAMB(lr=0.05, layers="module"),
}
DATA = fl.digits()
CLIENTS = fl.shards(DATA.train[1][:1400], n=20)  # equal ones, so that compiling pays


def start(algorithm, model: nn.Module, rounds: int, compile: bool = False) -> fl.Run:
    task = fl.Task(model, DATA.train, DATA.test)
    return fl.fit(
        algorithm, task, clients=CLIENTS, fraction=0.5, rounds=rounds, batch_size=16, seed=1,
        compile=compile,
    )  # fmt: skip


def difference(algorithm) -> float:
    """Largest difference of the parameters after 10 rounds in float64, CPU against GPU."""
    after = []
    for device in ("cpu", "cuda"):
        run = start(algorithm, fl.mlp(64, [64], 10).double().to(device), rounds=10)
        list(run)
        after.append({n: p.cpu() for n, p in run.params.items()})
    return max(float((after[0][n] - after[1][n]).abs().max()) for n in after[0])


def convolutional() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Flatten(),
            nn.Linear(288, 10),
        ).cuda()


def small() -> nn.Module:
    return fl.mlp(64, [64], 10).cuda()


def resumes(algorithm, model, compile: bool = False) -> bool:
    """The same bits after a restore: with convolution, batch norm and dropout under the loop, or
    with a small model vectorised."""
    whole, first, second = (start(algorithm, model(), 5, compile) for _ in range(3))
    list(whole)
    next(first), next(first)
    with tempfile.TemporaryDirectory() as folder:
        first.save(Path(folder) / "c")
        second.restore(Path(folder) / "c")
    list(second)
    ours, theirs = ({**r.params, **r.buffers} for r in (second, whole))
    return all(torch.equal(ours[n], theirs[n]) for n in ours)


def main() -> None:
    print(sys.version.split()[0], "torch", torch.__version__, torch.cuda.get_device_name())
    torch.use_deterministic_algorithms(mode=True)
    holds = True
    for name in sys.argv[1:] or METHODS:
        algorithm = METHODS[name]
        state = torch.cuda.get_rng_state()
        error = difference(algorithm)
        same = [
            resumes(algorithm, model, c) for model in (convolutional, small) for c in (False, True)
        ]
        untouched = torch.equal(state, torch.cuda.get_rng_state())
        print(f"{name:10} CPU-GPU {error:.1e}, same bits {same}, generator untouched {untouched}")
        holds = holds and error < 1e-9 and all(same) and untouched
    sys.exit(not holds)


if __name__ == "__main__":
    main()
