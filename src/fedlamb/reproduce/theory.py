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

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import log, sqrt
from statistics import linear_regression, mean, stdev
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from ..algorithm import AnyAlgorithm, Kept
from ..algorithms import FedAMS, FedLAMB
from ..local_round import local_round
from ..schedules import StepDecay
from ..tasks.images import Batch
from ..trees import Tree, tree_map

Line = dict[str, Any]
"""One line of theory.jsonl: experiment, settings, seed, and what was measured."""
Measure = Literal["plain", "weighted"]
Gradient = Callable[[Tensor, Tensor], Tensor]
"""Point and centre to the exact gradient of one client's loss."""
OnSteps = Callable[[int], None]
"""Told how many local steps have been taken since the last call."""


def unheard(steps: int) -> None:
    """Tells nobody."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One point of an experiment, in the paper's letters."""

    method: Literal["fed-lamb", "fed-ams"] = "fed-lamb"
    n: int = 8
    R: int = 1024
    T: int = 1
    h: int = 4
    Z: int = 1
    p: int = 64
    sigma: float = 1.0
    heterogeneity: float = 0.0
    every: int = 1
    """With 3, only every third client has a centre of its own."""
    c: float = 4.0
    """alpha = c / sqrt(h R), as the corollary has it."""
    grows_with_n: bool = False
    """Whether alpha is multiplied by sqrt(n) too, which the corollary does not do."""

    @property
    def alpha(self) -> float:
        """The rate, the same in all rounds."""
        return self.c * sqrt((self.n if self.grows_with_n else 1) / (self.h * self.R))

    def algorithm(self) -> AnyAlgorithm:
        """The library's own, with its defaults for everything that is not set here."""
        if self.method == "fed-ams":
            return FedAMS(lr=self.alpha, sync_every=self.Z)
        return FedLAMB(lr=self.alpha, sync_every=self.Z, phi_min=1.0, phi_max=1.0)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One letter is varied, all else is held."""

    name: str
    title: str
    axis: str
    values: tuple[int, ...]
    setting: Setting
    theorem: float
    """The exponent of the slowest term on Theorem 1's right side, for the weighted measure."""
    corollary: float
    """The same for the corollary and the plain measure."""
    why: str = ""
    """What explains a slope that is not as predicted."""

    def points(self) -> list[Setting]:
        """The settings, one for each value."""
        changes: list[dict[str, Any]] = [{self.axis: value} for value in self.values]
        return [replace(self.setting, **change) for change in changes]


_FOURFOLD = (1, 4, 16, 64)
_ROUNDS = (64, 256, 1024, 4096, 16384)
EXPERIMENTS = (
    Experiment(
        name="n",
        title="n, noise",
        axis="n",
        values=_FOURFOLD,
        setting=Setting(R=4096),
        theorem=0.0,  # its term 4 alpha M^2 / sqrt(eps) has no n
        corollary=-0.5,
        why="Theorem 1 has terms without n, which the corollary drops. The rate has no n "
        "either, so the way from the start takes many clients as long as one.",
    ),
    Experiment(
        name="n-rate-grows",
        title="n, noise, alpha times √n",
        axis="n",
        values=_FOURFOLD,
        setting=Setting(R=4096, c=1.0, grows_with_n=True),
        theorem=0.5,
        corollary=-0.5,  # the linear speed-up that the paper claims, at the usual rate for it
    ),
    Experiment(
        name="n-exact",
        title="n, exact gradients",
        axis="n",
        values=_FOURFOLD,
        setting=Setting(sigma=0.0),
        theorem=0.0,
        corollary=-0.5,
        why="Without noise, n clients with the same loss are one; nothing can fall with n.",
    ),
    Experiment(
        name="R",
        title="R, noise",
        axis="R",
        values=_ROUNDS[:-1],
        setting=Setting(),
        theorem=-0.5,
        corollary=-0.5,
    ),
    Experiment(
        name="R-all-differ",
        title="R, exact, all clients differ",
        axis="R",
        values=_ROUNDS,
        setting=Setting(sigma=0.0, heterogeneity=1.0),
        theorem=-0.5,  # T = 1: every term with G is 0
        corollary=-0.5,
    ),
    Experiment(
        name="R-third-differ",
        title="R, exact, every third differs",
        axis="R",
        values=_ROUNDS,
        setting=Setting(sigma=0.0, heterogeneity=1.0, every=3),
        theorem=-0.5,
        corollary=-0.5,
        why="Each client's step has the same length however large its gradient is, so the model "
        "settles where the directions cancel, not where the gradients do.",
    ),
    Experiment(
        name="R-third-differ-fed-ams",
        title="R, exact, every third differs, Fed-AMS",
        axis="R",
        values=_ROUNDS,
        setting=Setting(method="fed-ams", c=2.0, sigma=0.0, heterogeneity=1.0, every=3),
        theorem=-0.5,  # of Chen, Li, Li (2020)
        corollary=-0.5,
    ),
    Experiment(
        name="T",
        title="T, noise",
        axis="T",
        values=(1, 2, 4, 8, 16, 32),
        setting=Setting(R=256),
        theorem=2.0,  # its second term has (T - 1)^2 whatever G is
        corollary=0.0,
    ),
    Experiment(
        name="T-third-differ",
        title="T, noise, every third differs",
        axis="T",
        values=(1, 2, 4, 8, 16, 32),
        setting=Setting(R=256, heterogeneity=1.0, every=3),
        theorem=2.0,
        corollary=2.0,
    ),
    Experiment(
        name="h",
        title="h at p = 64, noise",
        axis="h",
        values=_FOURFOLD,
        setting=Setting(),
        theorem=0.5,
        corollary=0.5,
    ),
    Experiment(
        name="h-exact",
        title="h at p = 64, exact gradients",
        axis="h",
        values=_FOURFOLD,
        setting=Setting(sigma=0.0),
        theorem=-0.5,
        corollary=-0.5,
        why="With phi = 1, a whole step has length alpha sqrt(h) = c / sqrt(R), whatever h is.",
    ),
    Experiment(
        name="Z",
        title="Z, noise",
        axis="Z",
        values=_FOURFOLD,
        setting=Setting(R=2048),
        theorem=0.0,
        corollary=0.0,
        why="The weighted measure divides by v_hat, which grows more slowly where it is "
        "synchronised less often; the gradients themselves hardly change.",
    ),
)


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


class Slope(NamedTuple):
    """A mean over seeds and half the width of its 95 % confidence interval."""

    mean: float
    half: float

    def __str__(self) -> str:
        return f"{self.mean:+.3f} ± {self.half:.3f}"


class Verdict(NamedTuple):
    """What the paper allows at most, and what was measured, as exponents of the letter varied."""

    experiment: Experiment
    measure: Measure
    predicted: float
    slope: Slope
    """Over all values, by least squares."""
    last: Slope
    """Between the two largest values."""

    @property
    def holds(self) -> bool:
        """Whether both slopes are at most as predicted; a right side may be loose, not low."""
        return max(s.mean + s.half for s in (self.slope, self.last)) <= self.predicted + TOLERANCE


TOLERANCE = 0.1  # a fit over a finite range is not the limit


def verdicts(lines: Sequence[Line]) -> list[Verdict]:
    """Two for each experiment that the lines hold."""
    found = []
    for experiment in EXPERIMENTS:
        by_seed = _by_seed(experiment, lines)
        if not by_seed:
            continue
        values = sorted(by_seed[0])
        predicted: dict[Measure, float] = {
            "plain": experiment.corollary,
            "weighted": experiment.theorem,
        }
        for which, exponent in predicted.items():
            all, last = (
                interval([slope(some, [of[v][which] for v in some]) for of in by_seed])
                for some in (values, values[-2:])
            )
            found.append(Verdict(experiment, which, exponent, all, last))
    return found


def _by_seed(experiment: Experiment, lines: Sequence[Line]) -> list[dict[int, Line]]:
    """For each seed, the line of each value."""
    found: dict[int, dict[int, Line]] = {}
    for line in lines:
        if line["experiment"] == experiment.name:
            found.setdefault(line["seed"], {})[line["settings"][experiment.axis]] = line
    return list(found.values())


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The least-squares slope of log y over log x."""
    return linear_regression([log(v) for v in x], [log(v) for v in y]).slope


def interval(values: Sequence[float]) -> Slope:
    """The mean and its 95 % confidence interval, by Student's t."""
    return Slope(mean(values), t95(len(values) - 1) * stdev(values) / sqrt(len(values)))


def t95(freedom: int) -> float:
    """The 97.5 % point of Student's t: tabled, then by its series, good to three digits."""
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    z = 1.959964
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / float(freedom) ** power for power, term in enumerate(terms, 1))


_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
