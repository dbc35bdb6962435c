"""What is varied to test the theory, and what the paper says will happen."""

from dataclasses import dataclass, replace
from math import sqrt
from typing import Any, Literal

from ...algorithm import AnyAlgorithm
from ...algorithms import FedAMS, FedLAMB


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
