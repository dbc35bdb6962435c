"""The paper's Theorem 1 and its corollary, measured on a problem that meets their assumptions.

Client i's loss is the sum over p coordinates of u^2 / (1 + u^2) with u = x - c_i: bounded, smooth,
not convex. Its centre is c_i = heterogeneity * z_i with z_i standard normal, either for all clients
or for every third one, the others' being 0. A stochastic gradient is the exact one plus sigma or
-sigma in each coordinate: unbiased, bounded, of variance sigma^2. phi is held at 1, the simplest
function that Assumption 4 allows. All clients take part in every round.

Measured are, with exact gradients of the mean loss f at the global model after each round,

    plain     mean over r = 1..R of |grad f(theta_r)|^2                  (the corollary's left side)
    weighted  mean over r = 1..R of |grad f(theta_r) / v_hat_r^(1/4)|^2  (Theorem 1's left side)
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from ...algorithm import AnyAlgorithm, Kept
from ...local_round import local_round
from ...tasks.images import Batch
from ...trees import Tree, tree_map
from .experiments import Experiment, Setting

Line = dict[str, Any]
"""One line of theory.jsonl: experiment, settings, seed, and what was measured."""
Measure = Literal["plain", "weighted"]
Gradient = Callable[[Tensor, Tensor], Tensor]
"""Point and centre to the exact gradient of one client's loss."""
OnSteps = Callable[[int], None]
"""Told how many local steps have been taken since the last call."""


def unheard(steps: int) -> None:
    """Tells nobody."""


def gradient(x: Tensor, centre: Tensor) -> Tensor:
    """The derivative of u^2 / (1 + u^2) with u = x - centre."""
    u = x - centre
    return 2 * u / (1 + u * u) ** 2


def quadratic(x: Tensor, centre: Tensor) -> Tensor:
    """The derivative of u^2 / 2 with u = x - centre."""
    return x - centre


def trajectory(
    algorithm: AnyAlgorithm,
    start: Tensor,
    centres: Tensor,
    gradient: Gradient,
    rounds: int,
    steps: int = 1,
    noise: Callable[[], Tensor] | None = None,
    on_steps: OnSteps = unheard,
) -> Iterator[Any]:
    """The server's state after each round, for all seeds at once.

    start: seeds x 1 x layers x size of a layer; centres and noise: seeds x clients x layers x size.

    Fed-LAMB's layers meet only in the gradient, and these losses are sums over coordinates, so
    every layer is run as a model of its own: one vmap over the layers of all clients and seeds.
    """
    shape, exact = centres.shape, torch.zeros_like(centres)
    server = algorithm.server_init({"x": start})
    client = algorithm.client_init({"x": exact.flatten(0, 2)})

    def rows(tree: Tree) -> Tree:
        return tree_map(lambda t: t.expand(shape).flatten(0, 2), tree)

    def over_clients(tree: Tree) -> Tree:
        return tree_map(lambda t: t.reshape(shape).mean(1, keepdim=True), tree)

    for _ in range(rounds):
        sent = algorithm.broadcast(server)
        noises = [(noise() if noise else exact).flatten(0, 2) for _ in range(steps)]
        client, report = vmap(partial(_client_round, algorithm, gradient, sent))(
            client, rows(sent.params), rows(sent.v_hat.tree), centres.flatten(0, 2), noises
        )
        server = algorithm.server_update(server, type(report)(*map(over_clients, report)))
        on_steps(steps)
        yield server


class _Exact(NamedTuple):
    """Gradients of one client's loss; a batch is the noise that a stochastic one has."""

    gradient: Gradient
    centre: Tensor

    def minibatch(self, params: Tree, buffers: Tree, batch: Batch) -> tuple[Tree, Tree, Tensor]:
        exact = self.full(params, buffers, batch)
        return {"x": exact["x"] + batch.rows}, buffers, params["x"].new_zeros(())

    def full(self, params: Tree, buffers: Tree, data: Batch) -> Tree:
        return {"x": self.gradient(params["x"], self.centre)}


def _client_round(
    algorithm: AnyAlgorithm,
    gradient: Gradient,
    sent: Any,
    client: Any,
    params: Tree,
    v_hat: Tree,
    centre: Tensor,
    noises: list[Tensor],
) -> Any:
    sent = sent._replace(params=params, v_hat=Kept(sent.v_hat.version, v_hat))
    batches = [Batch(noise) for noise in noises]
    done = local_round(
        algorithm, _Exact(gradient, centre), client, sent, {}, Batch(centre), batches
    )
    return done.client, done.report


class Measured(NamedTuple):
    """Both left sides, a value for each seed."""

    plain: Tensor
    weighted: Tensor


def left_sides(states: Iterable[Any], centres: Tensor, gradient: Gradient) -> Measured:
    """Both measures, averaged over the rounds of a trajectory."""
    plain, weighted = [], []
    for server in states:
        g2 = gradient(server.params["x"], centres).mean(1, keepdim=True) ** 2
        plain.append(g2.sum((1, 2, 3)))
        weighted.append((g2 / server.v_hat.tree["x"].sqrt()).sum((1, 2, 3)))
    return Measured(torch.stack(plain).mean(0), torch.stack(weighted).mean(0))


def measure(setting: Setting, seeds: int, on_steps: OnSteps = unheard) -> Measured:
    """Runs all seeds of a setting at once; what a seed gives does not depend on the others."""
    s, layers = setting, (setting.h, setting.p // setting.h)
    randoms = [torch.Generator().manual_seed(seed) for seed in range(seeds)]
    starts = [2 * torch.randn(s.p, generator=g, dtype=torch.float64) for g in randoms]
    z = [torch.randn(s.n, s.p, generator=g, dtype=torch.float64) for g in randoms]
    differs = (torch.arange(s.n) % s.every == 0)[:, None, None]
    centres = s.heterogeneity * differs * torch.stack(z).reshape(seeds, s.n, *layers)
    coins = torch.empty_like(centres)

    def noise() -> Tensor:
        for mine, random in zip(coins, randoms, strict=True):
            mine.random_(0, 2, generator=random)
        return s.sigma * (2 * coins - 1)

    states = trajectory(
        s.algorithm(),
        torch.stack(starts).reshape(seeds, 1, *layers),
        centres,
        gradient,
        rounds=s.R,
        steps=s.T,
        noise=noise if s.sigma else None,
        on_steps=on_steps,
    )
    return left_sides(states, centres, gradient)


def run(experiment: Experiment, seeds: int, on_steps: OnSteps = unheard) -> Iterator[Line]:
    """A line for each value and seed."""
    for setting in experiment.points():
        found = measure(setting, seeds, on_steps)
        for seed in range(seeds):
            yield {
                "experiment": experiment.name,
                "settings": {**asdict(setting), "alpha": setting.alpha},
                "seed": seed,
                "plain": float(found.plain[seed]),
                "weighted": float(found.weighted[seed]),
            }
