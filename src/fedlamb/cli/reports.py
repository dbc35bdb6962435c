"""Reports, drawn again from folders alone."""

from pathlib import Path
from typing import Annotated

import typer

from ..report import page
from .runs import experiment_of, show, summaries_of
from .sweeps import show_sweep


def report(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Made by run, compare or sweep.")
    ],
) -> None:
    """Draw report.html again and print the table, from the folder of a run or sweep alone."""
    page.require()
    if (folder / "sweep.json").is_file():
        show_sweep(folder)
    else:
        experiment = experiment_of(folder)
        show(experiment, folder, summaries_of(experiment, folder))
