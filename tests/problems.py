"""Small problems, the same for the library and for the NumPy references."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

import fedlamb as fl
from reference import models


@dataclass(frozen=True)
class Small:
    """A problem small enough for slow loops: data, split and model from one seed, float64."""

    kind: str = "mlp"  # "mlp", "softmax" or "regression"
    sizes: tuple[int, ...] = (7, 4, 9)  # rows of each client
    inputs: int = 4
    seed: int = 0
    rounds: int = 3
    federation: dict[str, Any] = field(default_factory=dict)  # further arguments of fit

    @property
    def outputs(self) -> int:
        return 2 if self.kind == "regression" else 3

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        draw = np.random.default_rng(self.seed)
        n = sum(self.sizes)
        x = draw.normal(size=(n, self.inputs))
        if self.kind == "regression":
            return x, draw.normal(size=(n, self.outputs))
        return x, draw.integers(self.outputs, size=n)

    def clients(self) -> list[np.ndarray]:
        rows = np.random.default_rng(self.seed + 1).permutation(sum(self.sizes))
        return np.split(rows, np.cumsum(self.sizes)[:-1])

    def module(self) -> nn.Module:
        with torch.random.fork_rng():
            if self.kind == "mlp":
                module: nn.Module = nn.Sequential(
                    nn.Linear(self.inputs, 5), nn.Tanh(), nn.Linear(5, self.outputs)
                )
            else:
                module = nn.Linear(self.inputs, self.outputs)
        draw = np.random.default_rng(self.seed + 2)
        module = module.double()
        for parameter in module.parameters():
            parameter.data = torch.from_numpy(draw.normal(size=parameter.shape))
        return module

    def numpy_model(self) -> Any:
        if self.kind == "mlp":
            return models.MLP(self.inputs, 5, self.outputs)
        if self.kind == "softmax":
            return models.SoftmaxRegression(self.inputs, self.outputs)
        return models.LinearRegression(self.inputs, self.outputs)

    def task(self) -> fl.Task:
        return fl.Task(self.module(), train=self.data(), test=self.data())

    def fit(self, algorithm: Any, **changes: Any) -> fl.Run:
        arguments = {
            "clients": self.clients(),
            "rounds": self.rounds,
            "fraction": 1.0,
            "batch_size": 3,
            "seed": self.seed,
            **self.federation,
            **changes,
        }
        return fl.fit(algorithm, self.task(), **arguments)


class Recorded:
    """An algorithm that also notes every local and server state it makes."""

    def __init__(self, algorithm: Any) -> None:
        self.algorithm = algorithm
        self.locals: list[Any] = []
        self.servers: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.algorithm, name)

    def client_step(self, local: Any, sent: Any, grad_at: Any) -> Any:
        self.locals.append(self.algorithm.client_step(local, sent, grad_at))
        return self.locals[-1]

    def server_update(self, server: Any, mean: Any) -> Any:
        self.servers.append(self.algorithm.server_update(server, mean))
        return self.servers[-1]
