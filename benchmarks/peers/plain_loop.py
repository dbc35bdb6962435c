"""A plain PyTorch loop: one model, batches sliced from one tensor, one process of two threads."""

import time

import numpy as np
import torch
import workload
from networks import accuracy, build, tensors
from torch.nn.functional import cross_entropy


def main() -> None:
    """Runs the rounds and reports."""
    args = workload.arguments()
    torch.set_num_threads(2)
    x, y, xt, yt = tensors(workload.load(args.data))
    clients = [torch.from_numpy(rows) for rows in workload.shards(len(y))]
    draw = np.random.default_rng(workload.SEED)
    model = build(args.workload)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=workload.LR)
    seconds, accuracies = [], []
    for _ in range(args.rounds):
        begun = time.perf_counter()
        start = [p.detach().clone() for p in parameters]
        mean = [torch.zeros_like(p) for p in start]
        for client in workload.cohort(draw):
            with torch.no_grad():
                torch._foreach_copy_(parameters, start)
            rows = clients[client]
            rows = rows[torch.randperm(len(rows))]
            inputs, targets = x[rows], y[rows]
            for batch, labels in zip(
                inputs.split(workload.BATCH), targets.split(workload.BATCH), strict=True
            ):
                optimizer.zero_grad()
                cross_entropy(model(batch), labels).backward()
                optimizer.step()
            with torch.no_grad():
                torch._foreach_add_(mean, parameters, alpha=1 / workload.COHORT)
        with torch.no_grad():
            torch._foreach_copy_(parameters, mean)
        accuracies.append(accuracy(model, xt, yt))
        seconds.append(time.perf_counter() - begun)
    workload.report(seconds, accuracies)


if __name__ == "__main__":
    main()
