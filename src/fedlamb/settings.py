"""Settings in TOML, checked: every problem is told as one sentence."""

import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from .algorithms import ALGORITHMS
from .errors import SettingError, unknown_key, unknown_name
from .schedules import StepDecay, constant
from .simulate.fit import ExecutorName, Weighting
from .simulate.saved import describe
from .tasks.datasets import NAMES
from .tasks.models import Norm
from .tasks.task import Precision

Count = Annotated[int, Field(ge=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Data(_Section):
    """Which data set."""

    name: str
    """One of the known names, a folder, or an id on the hub."""
    root: str | None = None
    """The folder that holds NAME/; it is looked into first."""
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The share of the training set that is set aside for tuning."""


class Split(_Section):
    """How the training rows are dealt to the clients."""

    kind: Literal["iid", "shards", "classes", "dirichlet", "column", "file"]
    clients: Count | None = None
    """How many; a column or a file tells it itself."""
    per_client: Count = 2
    """Shards, or classes, for each client."""
    alpha: Annotated[float, Field(gt=0)] = 0.5
    """Of the Dirichlet draws."""
    balanced: bool = True
    """Whether Dirichlet clients have equal sizes."""
    allocation: Literal["fixed", "per_round"] = "fixed"
    """One split for the whole run, or all rows dealt anew to the active clients in each round."""
    column: str | None = None
    """A client for each value of this column."""
    file: str | None = None
    """A JSON file with a list of rows for each client."""


class Model(_Section):
    """Which model."""

    name: str = "mlp"
    """mlp, cnn, resnet18, vit, or one's own as my.module:build."""
    hidden: Annotated[list[Count], Field(max_length=16)] = [200]
    """Of the MLP."""
    norm: Norm = "batch"
    """Of ResNet-18."""
    precision: Precision = "float32"


class Federation(_Section):
    """How the clients work together."""

    rounds: Count
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    batch_size: Count = 128
    epochs: Count = 1
    weighting: Weighting = "uniform"


def _number_of_workers(value: Any) -> Any:
    if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise PydanticCustomError("workers", "must be a whole number from 1 on, or 'auto'")
    return value


Workers = Annotated[int | Literal["auto"], BeforeValidator(_number_of_workers)]


class Engine(_Section):
    """Where and how it runs; this does not change a result, except for rounding."""

    device: str = "auto"
    """cpu, cuda, cuda:N, or a GPU where there is one."""
    executor: ExecutorName = "auto"
    workers: Workers = 1
    """Processes that share the clients of a round; auto: as many as a measurement finds best."""
    compile: bool = False
    """Whether local steps, and on a CPU the test pass, are compiled first."""


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
    engine: Engine = Engine()
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

    def with_method(self, method: str, table: Mapping[str, Any]) -> "Experiment":
        """The same experiment with these hyper-parameters for a method."""
        return self.model_copy(update={"algorithms": {**self.algorithms, method: dict(table)}})

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
    # A preset's title tells of its data and model.
    others = [c.strip() for c in changes if c.strip().startswith(("data.name", "model.", "split."))]
    if others and table.get("title") and not any(c.strip().startswith("title") for c in changes):
        table["title"] += f", but {', '.join(others)}"
    experiment = validate(table)
    folder = Path(experiment.data.name).expanduser()
    if experiment.data.name not in NAMES and folder.is_dir():
        # A run folder is resumed from anywhere.
        data = experiment.data.model_copy(update={"name": str(folder.absolute())})
        experiment = experiment.model_copy(update={"data": data})
    return experiment


def validate(table: Mapping[str, Any]) -> Experiment:
    """Settings from a plain table; every problem is told as one sentence."""
    try:
        experiment = Experiment.model_validate(table)
    except ValidationError as error:
        raise sentence(error) from None
    check_split(experiment.split)
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


def check_split(split: Split) -> None:
    """What a kind of split needs, and what does not go together."""
    if split.kind in ("column", "file"):
        if getattr(split, split.kind) is None:
            raise SettingError(f"split.{split.kind}", None, f"is needed by kind = {split.kind!r}")
        if split.allocation == "per_round":
            right = f"cannot deal a {split.kind} anew; use kind = 'iid' or another that is drawn"
            raise SettingError("split.allocation", "per_round", right)
    elif split.clients is None:
        raise SettingError("split.clients", None, "is missing and must be given")


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
        value = plain_value(text.strip())
    for depth, key in enumerate(keys[:-1]):
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            inner = ".".join(keys[: depth + 1])
            raise SettingError("--set", change, f"{inner} is a single value, not a section")
    table[keys[-1]] = value


def plain_value(text: str) -> Any:
    """A number in one of the forms that TOML does not take, such as .1 or 1.; or the text."""
    try:
        return float(text) if re.fullmatch(r"[-+]?(\d+\.|\.\d+)(e[-+]?\d+)?", text) else text
    except ValueError:
        return text


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


def sentence(error: ValidationError, *within: str) -> SettingError:
    """pydantic's first complaint in our form; `within` is the section that was validated."""
    first = error.errors()[0]
    *section, key = [*within, *(str(part) for part in first["loc"])]
    name = ".".join([*section, key])
    if first["type"] == "extra_forbidden":
        sections = ("federation", "split", "model", "data")
        where = [f"{name}.{key}" for name in sections if key in _keys_of([name])]
        if key in _HYPERPARAMETERS:
            where.append(f"algorithms.METHOD.{key}")
        if not section and key == "algorithm" and isinstance(first["input"], Mapping):
            # `run`, with its one method, takes this short form.
            names = [f"algorithms.METHOD.{field}" for field in first["input"]]
            right = f"is for `run`, with its one method; here give {' and '.join(names)}"
            return SettingError(key, dict(first["input"]), right)
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
