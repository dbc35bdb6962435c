"""FedLab's standalone pipeline: its FedAvg server handler and serial trainer, in one process.

Added here: the data set, of which the trainer asks a DataLoader per client, and the test pass,
which FedLab's pipeline leaves to its user. `import fedlab.contrib` imports torchvision for FedLab's
own data sets, none of which is used here; an empty module stands in for it, since torchvision's
usual build does not load beside a PyTorch without CUDA.
"""

# ruff: noqa: E402 - the stand-in comes before what imports it
import random
import sys
import time
from types import ModuleType

import torch

for name in ("torchvision", "torchvision.transforms", "torchvision.datasets"):
    sys.modules[name] = ModuleType(name)
sys.modules["torchvision"].transforms = sys.modules["torchvision.transforms"]
sys.modules["torchvision"].datasets = sys.modules["torchvision.datasets"]

import workload
from fedlab.contrib.algorithm.fedavg import FedAvgSerialClientTrainer, FedAvgServerHandler
from fedlab.core.standalone import StandalonePipeline
from networks import accuracy, build, tensors
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset


class Clients:
    """Each client's images, contiguous."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        parts = (torch.from_numpy(rows) for rows in workload.shards(len(y)))
        self.parts = [TensorDataset(x[rows], y[rows]) for rows in parts]

    def get_dataloader(self, id: int, batch_size: int) -> DataLoader:
        return DataLoader(self.parts[id], batch_size=batch_size, shuffle=True)


class Pipeline(StandalonePipeline):
    """FedLab's loop; tests and takes the time where FedLab calls for an evaluation."""

    def __init__(
        self,
        handler: FedAvgServerHandler,
        trainer: FedAvgSerialClientTrainer,
        test: tuple[Tensor, Tensor],
    ) -> None:
        super().__init__(handler, trainer)
        self.test = test
        self.seconds: list[float] = []
        self.accuracy: list[float] = []
        self.begun = time.perf_counter()

    def evaluate(self) -> None:
        self.accuracy.append(accuracy(self.handler.model, *self.test))
        now = time.perf_counter()
        self.seconds.append(now - self.begun)
        self.begun = now


def main() -> None:
    """Runs the rounds and reports."""
    args = workload.arguments()
    torch.set_num_threads(2)
    random.seed(workload.SEED)
    x, y, xt, yt = tensors(workload.load(args.data))
    model = build(args.workload)
    trainer = FedAvgSerialClientTrainer(model, workload.CLIENTS, cuda=False)
    trainer.setup_dataset(Clients(x, y))
    trainer.setup_optim(1, workload.BATCH, workload.LR)
    share = workload.COHORT / workload.CLIENTS
    handler = FedAvgServerHandler(model, args.rounds, share, cuda=False)
    pipeline = Pipeline(handler, trainer, (xt, yt))
    pipeline.main()
    workload.report(pipeline.seconds, pipeline.accuracy)


if __name__ == "__main__":
    main()
