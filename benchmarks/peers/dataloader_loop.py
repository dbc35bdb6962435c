"""The PyTorch loop of most papers' code: a DataLoader per client, a copy of the model for each."""

import copy
import time

import numpy as np
import torch
import workload
from networks import accuracy, build, tensors
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset, TensorDataset


def main() -> None:
    """Runs the rounds and reports."""
    args = workload.arguments()
    torch.set_num_threads(2)
    x, y, xt, yt = tensors(workload.load(args.data))
    train = TensorDataset(x, y)
    loaders = [
        DataLoader(Subset(train, rows.tolist()), batch_size=workload.BATCH, shuffle=True)
        for rows in workload.shards(len(y))
    ]
    draw = np.random.default_rng(workload.SEED)
    model = build(args.workload)
    seconds, accuracies = [], []
    for _ in range(args.rounds):
        begun = time.perf_counter()
        trained = []
        for client in workload.cohort(draw):
            local = copy.deepcopy(model)
            optimizer = torch.optim.SGD(local.parameters(), lr=workload.LR)
            for inputs, targets in loaders[client]:
                optimizer.zero_grad()
                cross_entropy(local(inputs), targets).backward()
                optimizer.step()
            trained.append(local.state_dict())
        mean = {name: torch.stack([s[name] for s in trained]).mean(0) for name in trained[0]}
        model.load_state_dict(mean)
        accuracies.append(accuracy(model, xt, yt))
        seconds.append(time.perf_counter() - begun)
    workload.report(seconds, accuracies)


if __name__ == "__main__":
    main()
