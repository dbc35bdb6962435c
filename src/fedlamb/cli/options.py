"""Options that several commands share, and the changes to settings that they stand for."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..errors import SettingError

Preset = Annotated[
    str,
    typer.Option(
        "--preset",
        "-p",
        help="A preset's name, or a settings file (.toml, or a run's settings.json).",
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="KEY=VALUE",
        help="Change one setting, for example federation.rounds=20; may be repeated.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="The run folder; by default a new one under runs/."),
]


def _folder(given: Path | None) -> Path | None:
    if given is not None and not given.is_dir():
        raise SettingError(
            "--data-root", str(given), "must be a folder that exists, with mnist/ and so on"
        )
    return given


DataRoot = Annotated[
    Path | None,
    typer.Option(
        "--data-root",
        callback=_folder,
        help="The folder that holds mnist/, cifar10/ and so on; then $FEDLAMB_DATA, the user's "
        "cache and the hub are tried.",
    ),
]
Device = Annotated[
    str | None,
    typer.Option("--device", help="cpu, cuda or cuda:N; by default a GPU where there is one."),
]
Workers = Annotated[
    str | None,
    typer.Option(
        "--workers",
        "-w",
        help="Processes that share the clients, by default one; auto: the number that a short "
        "measurement finds fastest.",
    ),
]


def of_method(method: str, changes: Sequence[str]) -> list[str]:
    """The changes, with algorithm.KEY as the method's own; those of other methods are refused."""
    own = f"algorithms.{method}."
    renamed = [
        own + c.removeprefix("algorithm.") if c.startswith("algorithm.") else c for c in changes
    ]
    for change in renamed:
        if change.startswith("algorithms.") and not change.startswith(own):
            right = f"sets another method than the one that is run, {method}; -m chooses it"
            raise SettingError("--set", change, right)
    return renamed


def with_options(
    changes: Sequence[str], root: Path | None, device: str | None, workers: str | None
) -> list[str]:
    """The changes, and those that have options of their own."""
    found = list(changes)
    if root is not None:
        found.append(f"data.root={json.dumps(str(root.absolute()))}")
    if device is not None:
        found.append(f"engine.device={json.dumps(device)}")
    if workers is not None:
        number = workers if workers.lstrip("-").isdigit() else json.dumps(workers)  # or auto
        found.append(f"engine.workers={number}")
    return found
