"""Folders of runs, comparisons and sweeps: go on with one, draw its report again."""

from pathlib import Path
from typing import Annotated

import typer

from ..errors import SettingError
from ..report import page
from .options import DataRoot, Device, Workers
from .runs import experiment_of, resume_run, show, summaries_of
from .sweeps import resume_sweep, show_sweep

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Made by run, compare or sweep.")]


def resume(
    folder: Folder,
    data_root: DataRoot = None,
    device: Device = None,
    workers: Workers = None,
) -> None:
    """Go on with what was interrupted or killed, to the same bits as an unbroken run.

    On the same machine with the same device and workers, that is; otherwise to rounding, as a
    sweep that was killed while it saved its trials.
    """
    if not _is_sweep(folder):
        resume_run(folder, data_root, device, workers)
    elif workers is not None:
        raise SettingError("workers", workers, "is not for sweeps, which have one process")
    else:
        resume_sweep(folder, data_root, device)


def report(folder: Folder) -> None:
    """Draw report.html again and print the table, from the folder alone."""
    page.require()
    if _is_sweep(folder):
        show_sweep(folder)
    else:
        experiment = experiment_of(folder)
        show(experiment, folder, summaries_of(experiment, folder))


def _is_sweep(folder: Path) -> bool:
    return (folder / "sweep.json").is_file()
