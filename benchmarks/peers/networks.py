"""The two models in PyTorch, and the test pass, for all contestants that use PyTorch."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from workload import SEED, Data


class CNN(nn.Module):
    """Two convolutions and two linear layers, with dropout: 21,840 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, 5)
        self.conv2 = nn.Conv2d(10, 20, 5)
        self.drop2 = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.drop1 = nn.Dropout()
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.drop2(self.conv2(x)), 2))
        return self.fc2(self.drop1(F.relu(self.fc1(x.flatten(1)))))


def build(workload: str) -> nn.Module:
    """The model of a workload; the global generator is seeded."""
    torch.manual_seed(SEED)
    if workload == "W2":
        return CNN()
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10))


def tensors(data: Data) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x, y, xt, yt), in the arrays' own memory."""
    x, y, xt, yt = map(torch.from_numpy, data)
    return x, y, xt, yt


@torch.no_grad()
def accuracy(model: nn.Module, xt: Tensor, yt: Tensor) -> float:
    """The share of all test examples that the model gets right, in evaluation mode."""
    model.eval()
    right = sum(
        int((model(inputs).argmax(1) == targets).sum())
        for inputs, targets in zip(xt.split(1000), yt.split(1000), strict=True)
    )
    model.train()
    return right / len(yt)
