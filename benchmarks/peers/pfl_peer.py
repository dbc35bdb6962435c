"""pfl-research, run by torchrun as two processes of one thread, its FederatedAveraging as it is.

Added here, since pfl has no such parts of its own: a federated data set that draws 25 of the 50
clients without replacement (pfl's samplers draw one user at a time) and shuffles each client's
images anew in each round (pfl runs through a user's data in a fixed order), and a central
evaluation after the first round too (pfl's starts after the second). Both processes draw the
same cohort and take every other client of it: 13 and 12.
"""

import time
from collections.abc import Iterator

import numpy as np
import torch
import workload
from networks import build, tensors
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.central_evaluation import CentralEvaluationCallback
from pfl.data.federated_dataset import FederatedDatasetBase
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops.selector import get_framework_module
from pfl.metrics import Metrics, StringMetricName, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


class Classifier(nn.Module):
    """A model with the two methods that pfl asks for."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.train()
        return cross_entropy(self.network(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        self.eval()
        return {"accuracy": Weighted(int((self.network(x).argmax(1) == y).sum()), len(y))}


class Clients(FederatedDatasetBase):
    """The 50 clients: a cohort is drawn without replacement, each client shuffled anew."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__()
        self.x, self.y = x, y
        self.rows = workload.shards(len(y))
        self.draw = np.random.default_rng(workload.SEED)
        ranks = get_framework_module().distributed
        self.rank, self.ranks = ranks.global_rank, ranks.world_size
        self.order = np.random.default_rng([workload.SEED, self.rank])

    def __next__(self) -> tuple[PyTorchTensorDataset, int]:
        raise NotImplementedError("clients are drawn as whole cohorts")

    def get_cohort(self, cohort_size: int) -> Iterator[tuple[PyTorchTensorDataset, int]]:
        cohort = workload.cohort(self.draw)
        assert len(cohort) == cohort_size
        for client in cohort[self.rank :: self.ranks]:
            rows = torch.from_numpy(self.order.permutation(self.rows[client]))
            yield PyTorchTensorDataset((self.x[rows], self.y[rows])), self._get_seed()


class Evaluation(CentralEvaluationCallback):
    """Evaluates after each round, shared by the processes, and takes the time."""

    def __init__(self, test: PyTorchTensorDataset) -> None:
        super().__init__(test, NNEvalHyperParams(local_batch_size=1000))
        self.accuracy: list[float] = []
        self.times: list[float] = []

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        super().on_train_begin(model=model)
        self.times.append(time.perf_counter())
        return Metrics()  # the first round brings its own under the same names

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        stop, found = self._eval(model)
        self.accuracy.append(found[StringMetricName("Central val | accuracy")].overall_value)
        self.times.append(time.perf_counter())
        return stop, found


def main() -> None:
    """Runs the rounds; the first process reports."""
    args = workload.arguments()
    torch.set_num_threads(1)
    np.random.seed(workload.SEED)  # noqa: NPY002 - pfl draws from the global generator
    x, y, xt, yt = tensors(workload.load(args.data))
    network = Classifier(build(args.workload))
    model = PyTorchModel(
        network,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
    )
    clients = Clients(x, y)
    torch.manual_seed(workload.SEED + clients.rank)
    evaluation = Evaluation(PyTorchTensorDataset((xt, yt)))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=args.rounds,
            evaluation_frequency=args.rounds,
            train_cohort_size=workload.COHORT,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=clients, val_data=clients),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1,
            local_learning_rate=workload.LR,
            local_batch_size=workload.BATCH,
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=1000),
        callbacks=[evaluation],
    )
    if clients.rank == 0:
        workload.report(np.diff(evaluation.times).tolist(), evaluation.accuracy)


if __name__ == "__main__":
    main()
