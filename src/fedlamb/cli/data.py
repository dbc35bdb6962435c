"""Data sets: list, prepare, split."""

import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from pydantic import ValidationError
from rich.table import Table
from rich.text import Text

from ..errors import SettingError
from ..experiment import build_clients
from ..report import holdings
from ..settings import Split, check_split, sentence
from ..tasks.datasets import (
    KNOWN,
    Dataset,
    decoded_folder,
    digits,
    find_local,
    label,
    load_dataset,
    places,
)
from ..tasks.decoded import cache_file
from ..tasks.partition import PerRound
from ..tasks.sources import hub_source
from .display import console, decoding
from .options import DataRoot

app = typer.Typer(
    no_args_is_help=True,
    help="Data sets: which there are, decode one, see what a split gives each client.",
)
Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help=f"digits, {', '.join(KNOWN)}, a folder, or owner/name on the hub."
    ),
]
_COLOURS = ("#D55E00", "#0072B2", "#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#999999", "#F0E442")


@app.command(name="list")
def list_sets(data_root: DataRoot = None) -> None:
    """Which data sets have a name, where each was found, and whether it is decoded."""
    places("mnist", data_root)  # a root that is not there is told once
    table, found = Table(), {"digits": "the package"}
    for heading in ("name", "what", "decoded"):
        table.add_column(heading)
    table.add_row("digits", "handwritten digits, 8×8 grey, 1,437 + 360", "yes")
    for name, known in KNOWN.items():
        try:
            source = find_local(name, data_root)
            place = source.place if source else f"the hub, as {known.hub}"
            source = source or hub_source(known.hub)
            decoded = cache_file(source, name, decoded_folder()).exists()
        except SettingError as error:
            place, decoded = str(error), False
        found[name] = str(place)
        table.add_row(name, known.about, "yes" if decoded else "no")
    console.print(table)
    for name, place in found.items():  # outside the table, which would break them
        console.print(f"{name + ':':15}{place}", soft_wrap=True)
    console.print(f"Decoded sets are kept in {decoded_folder()}", soft_wrap=True)


@app.command()
def prepare(name: Name, data_root: DataRoot = None) -> None:
    """Decode a data set once; every later load maps the decoded file into memory.

    Example: fedlamb data prepare cifar10 --data-root ~/data
    """
    start = time.perf_counter()
    data = _load(name, data_root)
    seconds = time.perf_counter() - start
    (x, y), (_, yt) = data.train, data.test
    console.print(
        f"{name}: {len(y):,} training and {len(yt):,} test examples of shape {tuple(x.shape[1:])}, "
        f"{len(data.names)} classes, ready in {seconds:.2f} s",
        soft_wrap=True,
    )
    if data.source is not None and data.inputs is not None:
        console.print(f"from {data.source.place} ({data.source.layout})", soft_wrap=True)
        kept = cache_file(data.source, label(name), decoded_folder())
        console.print(f"decoded in {kept} ({kept.stat().st_size / 1e6:.1f} MB)", soft_wrap=True)
        of = zip(data.inputs.mean, data.inputs.std, strict=True)
        shown = ", ".join(f"{mean:.2f} ± {std:.2f}" for mean, std in of)
        console.print(f"training pixels, mean ± standard deviation of each channel: {shown}")


@app.command()
def split(
    name: Name,
    kind: Annotated[
        str, typer.Option(help="iid, shards, classes, dirichlet, column or file.")
    ] = "shards",
    clients: Annotated[int, typer.Option("--clients", "-n", help="How many clients.")] = 50,
    per_client: Annotated[int, typer.Option(help="Shards or classes for each client.")] = 2,
    alpha: Annotated[float, typer.Option(help="Of the Dirichlet draws.")] = 0.5,
    balanced: Annotated[bool, typer.Option(help="Whether Dirichlet sizes are equal.")] = True,
    column: Annotated[str | None, typer.Option(help="A client for each value of it.")] = None,
    file: Annotated[Path | None, typer.Option(help="JSON: a list of rows per client.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed deals the same.")] = 0,
    show: Annotated[int, typer.Option(min=1, help="How many clients to draw.")] = 20,
    data_root: DataRoot = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Draw all clients into this .html file.")
    ] = None,
) -> None:
    """Print and draw what each client would hold: sizes and classes.

    Example: fedlamb data split mnist --kind dirichlet --alpha 0.1 -n 20 --data-root ~/data
    """
    if out is not None:
        holdings.require(out)
    settings = _settings(
        kind=kind,
        clients=clients,
        per_client=per_client,
        alpha=alpha,
        balanced=balanced,
        column=column,
        file=str(file) if file else None,
    )
    data = _load(name, data_root)
    dealt = build_clients(settings, data, seed)
    assert not isinstance(dealt, PerRound)
    labels = data.train[1].numpy()
    held = np.stack([np.bincount(labels[rows], minlength=len(data.names)) for rows in dealt])
    _summary(held)
    _bars(held[:show], data.names)
    if len(held) > show:
        console.print(f"… and {len(held) - show} more clients (--show {len(held)}, or --out)")
    if out is not None:
        holdings.write(out, f"{label(name)}, {kind}, {len(held)} clients", held, data.names)
        console.print(f"Drawn in {out}", soft_wrap=True)


def _load(name: str, root: Path | None) -> Dataset:
    if name == "digits":
        return digits()
    with decoding(label(name)) as told:
        return load_dataset(name, root, told)


def _settings(**values: Any) -> Split:
    try:
        settings = Split.model_validate(values)
    except ValidationError as error:
        raise sentence(error, "split") from None
    check_split(settings)
    return settings


def _summary(held: NDArray[np.int64]) -> None:
    sizes, kinds = held.sum(axis=1), (held > 0).sum(axis=1)
    console.print(
        f"{len(held):,} clients, {sizes.sum():,} rows; rows per client: {sizes.min():,} to "
        f"{sizes.max():,}, median {int(np.median(sizes)):,}"
    )
    counted = zip(*np.unique(kinds, return_counts=True), strict=True)
    shown = ", ".join(
        f"{k}: {many:,} clients" if many > 1 else f"{k}: 1 client" for k, many in counted
    )
    console.print(f"classes per client: {shown}", soft_wrap=True)


def _bars(held: NDArray[np.int64], names: list[str]) -> None:
    """A bar for each client: its length is its size, its colours are its classes."""
    width = max(20, console.width - 36)
    largest = int(held.sum(axis=1).max())
    for client, counts in enumerate(held):
        bar = Text(f"{client:>6} {int(counts.sum()):>7,} ")
        edges = np.rint(np.cumsum(counts) * width / largest).astype(int)
        for c, cells in enumerate(np.diff(edges, prepend=0)):
            sign = names[c][:1] if len(names) <= 36 else "█"
            style = f"{_COLOURS[c % len(_COLOURS)]}" + (" reverse" if sign != "█" else "")
            bar.append(sign * int(cells), style=style)
        most = [f"{names[c]}: {counts[c]:,}" for c in np.argsort(-counts)[:2] if counts[c]]
        bar.append("  " + ", ".join(most))
        bar.truncate(console.width, overflow="ellipsis")
        console.print(bar)
