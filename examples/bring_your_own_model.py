"""Any nn.Module, any loss, any metric: robust regression by a small residual network."""

import torch
from torch import nn

import fedlamb as fl


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.lift = nn.Linear(3, width)
        self.block = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.lift(x)
        return self.head(h + self.block(h))


def mean_absolute_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).abs().mean()


draw = torch.Generator().manual_seed(0)
x = torch.randn(2000, 3, generator=draw)
y = (x[:, :1] * x[:, 1:2] + torch.sin(3 * x[:, 2:])) + 0.05 * torch.randn(2000, 1, generator=draw)

with torch.random.fork_rng():
    torch.manual_seed(0)
    model = Residual(width=32)

task = fl.Task(
    model,
    train=(x[:1600], y[:1600]),
    test=(x[1600:], y[1600:]),
    loss=nn.functional.huber_loss,
    metrics={"mae": mean_absolute_error},
)
run = fl.fit(
    fl.MimeLAMB(lr=0.02, layers="module", schedule=fl.StepDecay(after=(30,), factor=0.3)),
    task,
    clients=fl.iid(samples=1600, n=16),
    fraction=0.5,
    rounds=40,
    batch_size=32,
    weighting="examples",
)
for r in run:
    if r.number % 5 == 0:
        print(f"round {r.number:2}: mean absolute error {r.metrics['test_mae']:.3f}")
