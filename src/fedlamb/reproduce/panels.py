"""What the paper shows: each panel's settings, curves and grids."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..errors import unknown_name

_SMALL = [0.0001, 0.0003, 0.0005, 0.001, 0.003, 0.005, 0.01, 0.03, 0.05, 0.1]
_LARGE = [0.001, 0.003, 0.005, 0.01, 0.03, 0.05, 0.1, 0.3, 0.5]
PAPER: dict[str, dict[str, list[float]]] = {
    "fed-sgd": {"lr": _LARGE},
    "adp-fed": {"lr": [*_SMALL, 0.3, 0.5], "server_lr": _SMALL},
    "fed-ams": {"lr": _SMALL},
    "fed-lamb": {"lr": _LARGE},
    "mime": {"lr": _SMALL},
    "mime-lamb": {"lr": _LARGE},
}
"""The paper's grids, without weight decay."""
DECAYS = [0.0, 0.01, 0.1]  # of the two LAMB methods, in the paper

NARROW: dict[str, dict[str, list[float]]] = {
    "fed-sgd": {"lr": [0.03, 0.05, 0.1, 0.3, 0.5]},
    "adp-fed": {"lr": [0.01, 0.03, 0.1], "server_lr": [0.003, 0.01]},
    "fed-ams": {"lr": [0.0001, 0.0003, 0.001, 0.003, 0.01]},
    "fed-lamb": {"lr": [0.001, 0.003, 0.005, 0.01, 0.03, 0.05]},
    "mime": {"lr": [0.0001, 0.0003, 0.001, 0.003, 0.01]},
    "mime-lamb": {"lr": [0.001, 0.003, 0.005, 0.01, 0.03, 0.05]},
}
"""Part of them, for ResNet-18, of which a run takes minutes."""

METHODS = ("fed-lamb", "fed-ams", "fed-sgd", "mime-lamb", "mime", "adp-fed")
"""The most telling first."""
ADAPTIVE = ("fed-lamb", "fed-ams", "mime-lamb", "mime")


@dataclass(frozen=True)
class Curve:
    """One line of a panel: a method, and what is fixed for it beside the tuned rates."""

    method: str
    fixed: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """For legends and tables."""
        names = {"sync_every": "Z", "first_round": "first round"}
        shown = {names.get(k, k): v for k, v in self.fixed.items() if k != "schedule"}
        beside = ", ".join(f"{key} = {value}" for key, value in shown.items())
        return f"{self.method}, {beside}" if beside else self.method

    def grid(self, narrow: bool = False) -> dict[str, list[Any]]:
        """The paper's grid of this method, or part of it; fixed values are single points."""
        grid: dict[str, list[Any]] = dict((NARROW if narrow else PAPER)[self.method])
        if self.method.endswith("-lamb"):
            grid["weight_decay"] = DECAYS[:1] if narrow else DECAYS
        return {**grid, **{key: [value] for key, value in self.fixed.items()}}


@dataclass(frozen=True)
class Panel:
    """One small picture of a figure."""

    figure: str
    name: str
    title: str
    settings: dict[str, Any]
    """Of an experiment, without its algorithms."""
    curves: tuple[Curve, ...] = tuple(Curve(method) for method in METHODS)
    tuned_as: str | None = None
    """The panel whose chosen rates are taken over; None: tuned by itself."""
    rates_from: str | None = None
    """The panel whose rates are taken where this one has not been tuned, and need not be."""
    narrow: bool = False
    """Tuned on part of the grid, over a tenth of the rounds, and at most two points go on."""

    @property
    def id(self) -> str:
        """Unique: figure/name."""
        return f"{self.figure}/{self.name}"

    @property
    def large(self) -> bool:
        """Whether a trial fills a GPU by itself; those of small models run there as one program."""
        return bool(self.settings["model"]["name"] == "resnet18")

    @property
    def rounds(self) -> int:
        """Of a whole run."""
        rounds: int = self.settings["federation"]["rounds"]
        return rounds


_DATA = {
    "mnist": ("mnist", "MNIST"),
    "fmnist": ("fashion_mnist", "Fashion-MNIST"),
    "cifar10": ("cifar10", "CIFAR-10"),
    "tiny": ("tiny_imagenet", "TinyImageNet"),
}


def _settings(
    data: str, model: str, iid: bool, epochs: int = 1, /, **changes: dict[str, Any]
) -> dict[str, Any]:
    """The paper's protocol: 50 clients, half of them in a round, all rows dealt anew to those.

    `changes`: section -> what it has otherwise.
    """
    resnet = model == "resnet18"
    spread: dict[str, Any] = {"kind": "iid"} if iid else {"kind": "shards", "per_client": 2}
    rounds = 100 if resnet else 50
    table: dict[str, dict[str, Any]] = {
        "data": {"name": _DATA[data][0]},
        "split": {**spread, "clients": 50, "allocation": "per_round"},
        "model": {"name": model, "precision": "bf16" if resnet else "float32"},
        "federation": {"rounds": rounds, "fraction": 0.5, "batch_size": 128, "epochs": epochs},
    }
    return {name: {**section, **changes.get(name, {})} for name, section in table.items()}


def _small(figure: str, iid: bool) -> Iterable[Panel]:
    """Figures 2 and 3: three pairs of data and model, 1 and 3 local epochs."""
    for epochs in (1, 3):
        for data, model in (("mnist", "mlp"), ("mnist", "cnn"), ("fmnist", "cnn")):
            spread = "IID" if iid else "non-IID"
            many = "1 local epoch" if epochs == 1 else f"{epochs} local epochs"
            title = f"{_DATA[data][1]} + {model.upper()}, {spread}, {many}"
            settings = _settings(data, model, iid, epochs)
            yield Panel(figure, f"{data}-{model}-{epochs}", title, settings)


_STEPS = {"schedule": {"after": [30, 70]}}  # ResNet-18's rates: a tenth from these rounds on


def _resnet(name: str, data: str, iid: bool, rates_from: str | None = None) -> Panel:
    spread = "IID" if iid else "non-IID"
    title = f"{_DATA[data][1]} + ResNet-18, {spread}"
    curves = tuple(Curve(method, _STEPS) for method in METHODS)
    settings = _settings(data, "resnet18", iid)
    return Panel("fig4", name, title, settings, curves, narrow=True, rates_from=rates_from)


_LAZY = tuple(Curve(m, {"sync_every": z}) for m in ("fed-lamb", "mime-lamb") for z in (1, 3, 5))
_MANY: dict[str, dict[str, Any]] = {
    "split": {"clients": 200},
    "federation": {"fraction": 1.0, "batch_size": 64, "rounds": 100},
}
_EPS = tuple(Curve(m, {"eps": e}) for m in ADAPTIVE for e in (1e-8, 1e-6, 1e-4, 1e-3, 1e-2))
_FIRST = tuple(Curve(m, {"first_round": f}) for m in ADAPTIVE for f in ("local", "vhat"))

PANELS: tuple[Panel, ...] = (
    *_small("fig2", iid=True),
    *_small("fig3", iid=False),
    _resnet("cifar10-resnet18", "cifar10", iid=False),
    _resnet("cifar10-resnet18-iid", "cifar10", iid=True),
    _resnet("tiny-resnet18", "tiny", iid=False, rates_from="fig4/cifar10-resnet18"),
    *(
        Panel(
            "fig5",
            f"{data}-cnn-lazy",
            f"{_DATA[data][1]} + CNN, non-IID, lazy synchronisation",
            _settings(data, "cnn", False),
            _LAZY,
            tuned_as=f"fig3/{data}-cnn-1",
        )
        for data in ("mnist", "fmnist")
    ),
    *(
        Panel(
            "fig6",
            f"{data}-cnn-200",
            f"{_DATA[data][1]} + CNN, non-IID, n = 200",
            _settings(data, "cnn", False, 1, **_MANY),
        )
        for data in ("mnist", "fmnist")
    ),
    Panel("eps", "mnist-mlp-1", "eps, MNIST + MLP, IID", _settings("mnist", "mlp", True), _EPS),
    Panel(
        "eps",
        "mnist-cnn-noniid",
        "eps, MNIST + CNN, non-IID",
        _settings("mnist", "cnn", False),
        _EPS,
    ),
    Panel(
        "first-round",
        "mnist-mlp-1",
        "First round, MNIST + MLP, IID",
        _settings("mnist", "mlp", True),
        _FIRST,
    ),
    Panel(
        "allocation",
        "mnist-mlp-fixed",
        "MNIST + MLP, non-IID, one fixed split",
        _settings("mnist", "mlp", False, split={"allocation": "fixed"}),
    ),
    *(
        Panel(
            "norm",
            f"cifar10-group-{'iid' if iid else 'noniid'}",
            f"CIFAR-10 + ResNet-18 with group norm, {'IID' if iid else 'non-IID'}",
            _settings("cifar10", "resnet18", iid, model={"norm": "group"}),
            tuple(Curve(m, _STEPS) for m in ("fed-lamb", "fed-ams", "fed-sgd")),
            narrow=True,
        )
        for iid in (True, False)
    ),
)
FIGURES = tuple(dict.fromkeys(panel.figure for panel in PANELS))


def panels_of(figure: str, name: str | None = None) -> list[Panel]:
    """The panels of a figure, or of all of them; only the one of that name, where given."""
    if figure == "table1":  # its numbers are the ends of figure 4's curves
        figure = "fig4"
    if figure not in (*FIGURES, "all"):
        raise unknown_name("figure", figure, (*FIGURES, "table1", "all"))
    there = [panel for panel in PANELS if figure in (panel.figure, "all")]
    if name is None:
        return there
    found = [panel for panel in there if panel.name == name]
    if not found:
        raise unknown_name("--panel", name, [panel.name for panel in there])
    return found
