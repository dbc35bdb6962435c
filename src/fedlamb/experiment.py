"""From settings to a federation: data, clients, task and run."""

import os
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from .errors import SettingError
from .settings import Engine, Experiment, Split, build_algorithm
from .simulate.fit import Run, fit
from .tasks.datasets import Dataset, load_dataset
from .tasks.decoded import Report
from .tasks.models import build_model
from .tasks.partition import PerRound, Rows, by_value, classes, dirichlet, iid, read_rows, shards
from .tasks.task import Task


def load_data(experiment: Experiment, report: Report = lambda done, total: None) -> Dataset:
    """The experiment's data, with the validation share set aside."""
    settings = experiment.data
    data = load_dataset(settings.name, settings.root, report)
    return (
        data.with_validation(settings.validation, experiment.seed) if settings.validation else data
    )


def build_task(experiment: Experiment, data: Dataset | None = None) -> Task:
    """Data and starting model of all methods of a seed.

    `data` is what `load_data` gives, for a caller that has it already.
    """
    data = data or load_data(experiment)
    model = experiment.model
    start = build_model(
        model.name,
        tuple(data.train[0].shape[1:]),
        len(data.names),
        hidden=model.hidden,
        norm=model.norm,
        seed=experiment.seed,
    ).to(device_of(experiment.engine))
    return Task(
        start,
        data.train,
        data.test,
        validation=data.validation,
        inputs=data.inputs,
        precision=model.precision,
    )


def build_run(
    experiment: Experiment,
    method: str,
    data: Dataset | None = None,
    task: Task | None = None,
    clients: Rows | PerRound | None = None,
) -> Run:
    """The federation of one method. Methods share data, split, start and cohorts.

    `data`, `task` and `clients` are for a caller that has them already.
    """
    if data is None and (task is None or clients is None):
        data = load_data(experiment)
    if clients is None:
        assert data is not None
        clients = build_clients(experiment.split, data, experiment.seed)
    return fit(
        build_algorithm(method, experiment.algorithms[method]),
        task or build_task(experiment, data),
        clients=clients,
        seed=experiment.seed,
        executor=experiment.engine.executor,
        compile=experiment.engine.compile,
        **experiment.federation.model_dump(),
    )


def device_of(engine: Engine) -> torch.device:
    """Where this process computes; the processes of a machine have a GPU each."""
    name = engine.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SettingError("engine.device", name, "must be cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise SettingError("engine.device", name, "must be cpu, cuda or cuda:N")
    if device.type == "cuda":
        there = torch.cuda.device_count()
        index = device.index
        workers = 1 if engine.workers == "auto" else engine.workers
        if workers > 1 and index is not None:
            right = f"is one GPU for {workers} workers; cuda gives each its own"
            raise SettingError("engine.device", name, right)
        if workers > there > 0:
            right = f"must be at most {there}, the GPUs that torch sees; or use --device cpu"
            raise SettingError("engine.workers", workers, right)
        if index is None:
            index = int(os.environ.get("LOCAL_RANK", "0"))
        if there == 0:
            raise SettingError("engine.device", name, "needs a GPU, and torch sees none; use cpu")
        if index >= there:
            right = f"is GPU number {index + 1}, and torch sees {there}; use --device cpu"
            raise SettingError("engine.device", name, right)
        device = torch.device("cuda", index)
    return device


def build_clients(split: Split, data: Dataset, seed: int) -> Rows | PerRound:
    """Who holds what; the rows are those of `data.train`."""
    labels = data.train[1]
    try:
        if split.kind == "column":
            return by_value(data.column(str(split.column)))
        if split.kind == "file":
            whole = len(labels) + (len(data.validation[1]) if data.validation else 0)
            return read_rows(Path(str(split.file)), whole, data.rows)
        deal = partial(_deal, split, labels.numpy())
        assert split.clients is not None
        if split.allocation == "per_round":
            return PerRound(deal, split.clients)
        return deal(split.clients, seed)
    except SettingError as error:
        setting = "clients" if error.setting == "n" else error.setting
        raise SettingError(f"split.{setting}", error.value, error.right) from None


def _deal(split: Split, labels: NDArray[np.int64], n: int, seed: int) -> Rows:
    match split.kind:
        case "iid":
            return iid(len(labels), n, seed)
        case "shards":
            return shards(labels, n, split.per_client, seed)
        case "classes":
            return classes(labels, n, split.per_client, seed)
        case _:
            return dirichlet(labels, n, split.alpha, split.balanced, seed)
