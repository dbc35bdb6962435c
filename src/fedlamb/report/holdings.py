"""A page that shows what each client holds: one bar for each client, one colour for each class."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import SettingError
from ..files import write_text
from .page import available


def require(path: Path) -> None:
    """Raises where the page could not be written."""
    if path.suffix != ".html":
        raise SettingError("out", str(path), "must end with .html")
    if not path.absolute().parent.is_dir():
        raise SettingError("out", str(path), "must lie in a folder that exists")
    if not available():
        raise SettingError("out", str(path), "needs plotly: pip install 'fedlamb[report]'")


def write(path: Path, title: str, held: NDArray[np.int64], names: list[str]) -> None:
    """Writes the page for `held` (clients, classes)."""
    from plotly.graph_objects import Bar, Figure
    from plotly.io import to_html

    clients = list(range(len(held)))
    figure: Any = Figure(
        [Bar(name=name, x=clients, y=held[:, c].tolist()) for c, name in enumerate(names)]
    )
    figure.update_layout(
        barmode="stack",
        bargap=0.1,
        title=title,
        xaxis_title="client",
        yaxis_title="training rows",
        template="plotly_white",
    )
    page = to_html(figure, include_plotlyjs=True, config={"displaylogo": False})
    write_text(path, page.replace("<head>", f"<head>{_VIEWPORT}", 1))


_VIEWPORT = '<meta name="viewport" content="width=device-width, initial-scale=1">'
