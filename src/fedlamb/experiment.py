"""Settings in TOML -> validated settings -> a federation."""

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .algorithms import ALGORITHMS
from .errors import SettingError, unknown_key, unknown_name
from .schedules import StepDecay, constant
from .simulate.fit import Run, Weighting, describe, fit
from .tasks.datasets import DATASETS
from .tasks.models import mlp
from .tasks.partition import iid, shards
from .tasks.task import Task

Count = Annotated[int, Field(ge=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Data(_Section):
    """Which data set."""

    name: str


class Split(_Section):
    """How the training rows are dealt to the clients."""

    kind: Literal["iid", "shards"]
    clients: Count
    per_client: Count = 2
    """Shards for each client."""


class Model(_Section):
    """Which model."""

    name: Literal["mlp"] = "mlp"
    hidden: Annotated[list[Count], Field(max_length=16)] = [64]


class Federation(_Section):
    """How the clients work together."""

    rounds: Count
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    batch_size: Count = 128
    epochs: Count = 1
    weighting: Weighting = "uniform"


class Experiment(_Section):
    """Everything that decides a result, and the algorithms to run under it."""

    title: str = ""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    target: Annotated[float, Field(gt=0, le=1)] = 0.9
    """The test accuracy for "rounds to target"."""
    data: Data
    split: Split
    model: Model = Model()
    federation: Federation
    algorithms: dict[str, dict[str, Any]]
    """Method -> its hyper-parameters."""

    def only(self, method: str) -> "Experiment":
        """The same experiment with one method."""
        if method not in self.algorithms:
            raise SettingError(
                "method",
                method,
                f"is not in these settings, which have {', '.join(self.algorithms)}; "
                f"give it a rate with --set algorithms.{method}.lr=0.01",
            )
        return self.model_copy(update={"algorithms": {method: self.algorithms[method]}})

    def complete(self) -> dict[str, Any]:
        """All settings as JSON-able values, every default written out."""
        full = self.model_dump(mode="json")
        full["algorithms"] = {
            name: {k: v for k, v in describe(build_algorithm(name, table)).items() if k != "class"}
            for name, table in self.algorithms.items()
        }
        return full


def load_experiment(source: str, changes: Sequence[str] = ()) -> Experiment:
    """The settings of a preset (by name) or a file (.toml or .json), with `key=value` changes."""
    table = _read(source)
    for change in changes:
        _apply(table, change)
    return validate(table)


def validate(table: Mapping[str, Any]) -> Experiment:
    """Settings from a plain table; every problem is told as one sentence."""
    try:
        experiment = Experiment.model_validate(table)
    except ValidationError as error:
        raise _sentence(error) from None
    if experiment.data.name not in DATASETS:
        raise unknown_name("data.name", experiment.data.name, DATASETS)
    for name, settings in experiment.algorithms.items():
        build_algorithm(name, settings)
    return experiment


def presets() -> list[str]:
    """The names of the presets that come with the package."""
    return sorted(p.name.removesuffix(".toml") for p in _preset_folder().iterdir())


def build_algorithm(name: str, settings: Mapping[str, Any]) -> Any:
    """The algorithm of that name with these hyper-parameters."""
    section = f"algorithms.{name}"
    if name not in ALGORITHMS:
        raise unknown_name("method", name, ALGORITHMS)
    cls = ALGORITHMS[name]
    values = dict(settings)
    for key, value in values.items():
        if key not in cls.__dataclass_fields__:
            raise unknown_key(section, key, value, cls.__dataclass_fields__)
    for field in fields(cls):
        if field.default is MISSING and field.name not in values:
            raise SettingError(f"{section}.{field.name}", None, "must be given, for example 0.01")
    if values.get("phi_max") == "inf":  # JSON has no infinity
        values["phi_max"] = math.inf
    try:
        if "schedule" in values:
            values["schedule"] = _schedule(values["schedule"])
        return cls(**values)
    except SettingError as error:
        raise error.under(section) from None


def build_run(experiment: Experiment, method: str) -> Run:
    """The federation of one method. Methods share data, split, start and cohorts."""
    data = DATASETS[experiment.data.name]()
    x, y = data.train
    split, seed = experiment.split, experiment.seed
    try:
        if split.kind == "iid":
            clients = iid(len(y), split.clients, seed)
        else:
            clients = shards(y, split.clients, split.per_client, seed)
    except SettingError as error:
        raise SettingError("split.clients", split.clients, error.right) from None
    model = mlp(x[0].numel(), experiment.model.hidden, data.classes, seed)
    return fit(
        build_algorithm(method, experiment.algorithms[method]),
        Task(model, data.train, data.test),
        clients=clients,
        seed=seed,
        **experiment.federation.model_dump(),
    )


def _preset_folder() -> Any:
    return files(__package__).joinpath("presets")


def _read(source: str) -> dict[str, Any]:
    path = Path(source)
    if path.suffix not in (".toml", ".json"):
        if source not in presets():
            raise unknown_name("preset", source, [*presets(), "or a .toml or .json file"])
        path = _preset_folder().joinpath(f"{source}.toml")
    try:
        text = path.read_text(encoding="utf-8")
        table: dict[str, Any] = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise SettingError("preset", source, f"cannot be read; {error}") from error
    if not isinstance(table, dict) or not table:
        raise SettingError("preset", source, "holds no settings; see fedlamb/presets/digits.toml")
    return table


def _apply(table: dict[str, Any], change: str) -> None:
    """Puts one `section.key=value` into the table; the value is TOML, or else a plain string."""
    path, equals, text = change.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise SettingError("--set", change, "must be KEY=VALUE, for example federation.rounds=20")
    try:
        value = tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    for depth, key in enumerate(keys[:-1]):
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            inner = ".".join(keys[: depth + 1])
            raise SettingError("--set", change, f"{inner} is a single value, not a section")
    table[keys[-1]] = value


def _schedule(value: Any) -> Any:
    if value == "constant":
        return constant
    if not isinstance(value, Mapping):
        raise SettingError("schedule", value, "must be a table such as {after = [30, 70]}")
    table = {key: part for key, part in value.items() if key != "class"}
    for key, part in table.items():
        if key not in StepDecay.__dataclass_fields__:
            raise unknown_key("schedule", key, part, StepDecay.__dataclass_fields__)
    if "after" not in table:
        raise SettingError("schedule.after", None, "must be given, for example [30, 70]")
    return StepDecay(**table)


def _sentence(error: ValidationError) -> SettingError:
    """pydantic's first complaint in our form."""
    first = error.errors()[0]
    *section, key = [str(part) for part in first["loc"]]
    name = ".".join([*section, key])
    if first["type"] == "extra_forbidden":
        sections = ("federation", "split", "model", "data")
        where = [f"{name}.{key}" for name in sections if key in _keys_of([name])]
        if key in _HYPERPARAMETERS:
            where.append(f"algorithms.METHOD.{key}")
        if not section and where:
            return SettingError(key, first["input"], f"is no setting; did you mean {where[0]!r}?")
        return unknown_key(".".join(section), key, first["input"], _keys_of(section))
    if first["type"] == "missing":
        return SettingError(name, None, "is missing and must be given")
    right = first["msg"].replace("Input should be", "must be").replace("valid dictionary or", "")
    if first["type"] == "model_type":
        right = f"must be a section with {', '.join(_keys_of([*section, key]))}"
    return SettingError(name, first["input"], right)


_HYPERPARAMETERS = {key for cls in ALGORITHMS.values() for key in cls.__dataclass_fields__}


def _keys_of(section: Sequence[str]) -> list[str]:
    model: Any = Experiment
    for part in section:
        model = model.model_fields[part].annotation
    return list(model.model_fields)
