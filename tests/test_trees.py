"""Arithmetic on trees loses no digits, alone and under vmap."""

from typing import Any

import pytest
import torch

import fedlamb as fl
from fedlamb.moments import ema, ema_of_square
from problems import Small


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999])
@pytest.mark.parametrize("way", ["plain", "vmap", "beta as an axis"])
def test_moments_are_exact_to_rounding(beta: float, way: str) -> None:
    draw = torch.Generator().manual_seed(0)
    mean, value = torch.rand(50, 40, generator=draw), torch.rand(50, 40, generator=draw)

    def both(mean: Any, value: Any, beta: Any) -> Any:
        return ema({"x": mean}, {"x": value}, beta), ema_of_square({"x": mean}, {"x": value}, beta)

    if way == "plain":
        found = both(mean, value, beta)
    elif way == "vmap":
        found = torch.func.vmap(both, in_dims=(0, 0, None))(mean, value, beta)
    else:
        betas = torch.tensor([beta], dtype=torch.float64)
        of_one = torch.func.vmap(both, in_dims=(None, None, 0))(mean, value, betas)
        found = tuple({"x": tree["x"][0]} for tree in of_one)
    expected = (
        beta * mean.double() + (1 - beta) * value.double(),
        beta * mean.double() + (1 - beta) * value.double() ** 2,
    )
    for tree, right in zip(found, expected, strict=True):
        assert tree["x"].dtype == torch.float32
        torch.testing.assert_close(tree["x"].double(), right, rtol=3e-7, atol=0)
    # What a step adds is as exact as the sum.
    added = found[1]["x"].double() - beta * mean.double()
    torch.testing.assert_close(added, (1 - beta) * value.double() ** 2, rtol=0, atol=1e-7)


def test_a_sweep_over_betas_equals_separate_runs_in_float32() -> None:
    small, rows = Small(kind="softmax"), torch.float32
    (x, y), module = small.data(), small.module().float()
    task = fl.Task(module, (torch.tensor(x, dtype=rows), y), (torch.tensor(x, dtype=rows), y))
    options: Any = {"clients": small.clients(), "rounds": 4, "batch_size": 3}
    betas = (0.9, 0.999, 0.9999)
    points = fl.sweep(fl.FedAMS(lr=0.01), task, grid={"beta2": betas}, **options)
    list(points)
    for point, beta in zip(points.points, betas, strict=True):
        alone = fl.fit(fl.FedAMS(lr=0.01, beta2=beta), task, executor="vectorised", **options)
        list(alone)
        for name, v_hat in alone.server.v_hat.tree.items():
            torch.testing.assert_close(
                point.run.server.v_hat.tree[name], v_hat, rtol=2e-6, atol=1e-12
            )
