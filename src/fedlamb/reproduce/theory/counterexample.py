"""Three clients with quadratic losses, where Fed-LAMB settles at the median and not at the mean."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from math import sqrt
from statistics import mean

import torch
from torch import Tensor

from ...algorithm import AnyAlgorithm
from ...algorithms import FedAMS, FedLAMB
from ...schedules import StepDecay
from .measured import Line, OnSteps, left_sides, quadratic, trajectory, unheard

MEDIAN = {
    "median": ((0.0, 0.0, 3.0), 2.0),
    "median-shifted": ((10.0, 10.0, 13.0), 12.0),
}
"""Centres of three clients with the loss (x - c)^2 / 2 each, and the start."""
MEDIAN_ROUNDS = 3000
SIDES_ROUNDS = (200, 800, 3200, 12800)


def median(on_steps: OnSteps = unheard) -> Iterator[Line]:
    """Fed-LAMB and Fed-AMS on three quadratics, with full gradients and one local step.

    Each client moves the one layer by the same length, so the majority wins: Fed-LAMB goes to the
    median of the centres. The mean loss has its only stationary point at their mean.
    """
    lr, decay = 0.02, StepDecay(after=(1000, 2000))
    methods: dict[str, AnyAlgorithm] = {
        "fed-lamb": FedLAMB(lr=lr, schedule=decay),
        "fed-ams": FedAMS(lr=lr, schedule=decay),
    }
    for name, (centres, start) in MEDIAN.items():
        for method, algorithm in methods.items():
            states = trajectory(
                algorithm,
                _scalars([start]),
                _scalars(centres),
                quadratic,
                rounds=MEDIAN_ROUNDS,
                on_steps=on_steps,
            )
            x = [start, *(float(server.params["x"]) for server in states)]
            yield {
                "experiment": name,
                "settings": {"method": method, "centres": centres, "lr": lr, **asdict(decay)},
                "seed": None,
                "x": [round(value, 6) for value in x],
                "gradient": x[-1] - mean(centres),
            }


def right_side(
    *, n: int, rounds: int, h: int, p: int, alpha: float, bound: float, delta: float, eps: float
) -> float:
    """Theorem 1's right side where T = 1, sigma = 0, phi_M = 1: three of its seven terms remain.

    bound: the paper's M; delta: its triangle; eps: the start of v_hat.
    """
    start = sqrt(bound**2 * p / n) * delta / (h * alpha * rounds)
    return start + 4 * alpha * bound**2 / sqrt(eps) + 4 * alpha * bound


def sides(on_steps: OnSteps = unheard) -> Iterator[Line]:
    """Both sides of Theorem 1 on the shifted quadratics, at the alpha that makes the right least.

    Its assumptions hold wherever the iterates go: L = 1, sigma = 0, gradients within M, phi = 1.
    (Beyond, each loss could go on as a straight line; nothing would change.) T = 1 leaves no term
    with G, and v_hat_0 = eps = 1 keeps the constants small.
    """
    (centres, start), eps, bound = MEDIAN["median-shifted"], 1.0, 3.1
    c = _scalars(centres)
    delta = (start - mean(centres)) ** 2 / 2
    for rounds in SIDES_ROUNDS:
        alpha = sqrt(sqrt(bound**2 / 3) * delta / (4 * rounds * (bound**2 + bound)))
        algorithm = FedLAMB(lr=alpha, eps=eps, phi_min=1.0, phi_max=1.0, first_round="vhat")
        states = list(
            trajectory(algorithm, _scalars([start]), c, quadratic, rounds=rounds, on_steps=on_steps)
        )
        left = left_sides(states, c, quadratic)
        facts = {"n": 3, "rounds": rounds, "h": 1, "p": 1, "alpha": alpha, "eps": eps}
        yield {
            "experiment": "theorem-1",
            "settings": {**facts, "centres": centres, "start": start},
            "seed": None,
            "plain": float(left.plain),
            "weighted": float(left.weighted),
            "right": right_side(**facts, bound=bound, delta=delta),  # type: ignore[arg-type]
            "largest_gradient": max(
                float(quadratic(server.params["x"], c).abs().max()) for server in states
            ),
        }


def _scalars(values: Sequence[float]) -> Tensor:
    """One scalar layer for each client: 1 x clients x 1 x 1."""
    return torch.tensor(values, dtype=torch.float64).reshape(1, -1, 1, 1)
