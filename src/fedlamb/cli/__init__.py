"""The command `fedlamb`."""

import io
import sys
from typing import Annotated

import typer
from rich.console import Console

from .. import __version__
from ..algorithms import ALGORITHMS
from ..errors import SettingError
from ..settings import presets
from ..simulate.crew import CrewError
from ..simulate.saying import leads
from . import data, folders, reproduce, runs, sweeps, theory
from .workers import follow_quietly

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Layer-wise adaptive federated learning: Fed-LAMB, Mime-LAMB and the methods beside them."
    f"\n\nMethods: {', '.join(ALGORITHMS)}. Presets: {', '.join(presets())}.",
)
for function in (
    runs.compare,
    runs.run,
    sweeps.sweep,
    folders.resume,
    folders.report,
    reproduce.reproduce,
    theory.theory,
):
    app.command()(function)
app.add_typer(data.app, name="data")


def main() -> None:
    """The entry point: bad input ends with one sentence and exit code 2."""
    follow_quietly()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # rather an odd sign than a lost result
    sys.path.append("")  # for a model of one's own, my_module:build, in this folder
    try:
        app()
    except SettingError as error:
        _fail(str(error), code=2)
    except CrewError as error:
        _fail(str(error), code=1)
    except OSError as error:
        _fail(str(error), code=1)


def _fail(message: str, code: int) -> None:
    if not leads():  # the one that does says it
        sys.exit(code)
    Console(stderr=True, highlight=False).print(f"fedlamb: {message}", markup=False, soft_wrap=True)
    sys.exit(code)


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit
