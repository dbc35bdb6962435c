"""`report.html`: curves, table and settings of a run or a comparison, in one file that needs no
network. Drawn from the run folders alone."""

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import SettingError
from ..files import write_text
from ..records import Summary
from .table import headings, rows

# Okabe and Ito's colours, told apart by colour-blind readers too; layer-wise methods are drawn
# solid, the others dashed.
_STYLE = {
    "fed-lamb": ("#D55E00", "solid"),
    "mime-lamb": ("#0072B2", "solid"),
    "fed-ams": ("#E69F00", "dash"),
    "mime": ("#56B4E9", "dash"),
    "adp-fed": ("#CC79A7", "dot"),
    "fed-sgd": ("#555555", "dot"),
}
Lines = Sequence[Mapping[str, Any]]


def available() -> bool:
    """Whether the drawing library is installed."""
    try:
        import plotly  # noqa: F401
    except ImportError:
        return False
    return True


def require() -> None:
    """Raises where the drawing library is not installed."""
    if not available():
        raise SettingError(
            "report", "report.html", "needs plotly: pip install 'fedlamb[report]' brings it"
        )


def write_page(
    path: Path,
    settings: Mapping[str, Any],
    metrics: Mapping[str, Lines],
    summaries: Sequence[Summary],
) -> None:
    """Writes the page for these methods' metrics."""
    target = float(settings["target"])
    federation, split = settings["federation"], settings["split"]
    clients = f"{split['clients']} clients" if split["clients"] else "clients"
    dealt = ", dealt anew in each round" if split["allocation"] == "per_round" else ""
    facts = (
        f"{settings['data']['name']}, {clients} ({split['kind']}{dealt}), "
        f"{federation['fraction']:g} of them each round, {federation['epochs']} local epoch(s) in "
        f"batches of {federation['batch_size']}, seed {settings['seed']}, n = 1 run per method; "
        f"target {100 * target:g} % test accuracy"
    )
    require()
    write_html(
        path,
        title=settings.get("title") or "fedlamb",
        facts=facts,
        table=html_table(headings(target), rows(summaries)),
        figures=[
            _figure(metrics, "round", "test_accuracy", "Test accuracy by round", target),
            _figure(metrics, "uplink", "test_accuracy", "Test accuracy by traffic", target),
            _figure(metrics, "round", "train_loss", "Training loss by round", None),
        ],
        settings=settings,
    )


def write_html(
    path: Path, title: str, facts: str, table: str, figures: Sequence[Any], settings: Any
) -> None:
    """Writes a page that needs no network: a line of facts, a table, figures, settings."""
    from plotly.io import to_html

    charts = "".join(
        to_html(
            figure,
            full_html=False,
            include_plotlyjs=number == 1,
            div_id=f"chart-{number}",
            config={"displaylogo": False, "responsive": True},
        )
        for number, figure in enumerate(figures, 1)
    )
    write_text(
        path,
        _PAGE.format(
            title=html.escape(title),
            facts=html.escape(facts),
            table=table,
            charts=charts,
            settings=html.escape(json.dumps(settings, indent=1)),
        ),
    )


def _figure(
    metrics: Mapping[str, Lines], by: str, what: str, title: str, target: float | None
) -> Any:
    from plotly.graph_objects import Figure, Scatter

    figure = Figure()
    for method, lines in metrics.items():
        colour, dash = _STYLE.get(method, ("#000000", "solid"))
        sent, by_traffic = 0.0, []
        for line in lines:
            sent += line["uplink_bytes"] / 1e6
            by_traffic.append(sent)
        figure.add_trace(
            Scatter(
                x=[line["round"] for line in lines] if by == "round" else by_traffic,
                y=[line[what] for line in lines],
                name=method,
                mode="lines",
                line={"color": colour, "dash": dash, "width": 2},
            )
        )
    if target is not None:
        figure.add_hline(y=target, line={"color": "#999999", "width": 1})
        figure.update_yaxes(tickformat=".0%")
    figure.update_layout(
        title=title,
        xaxis_title="round" if by == "round" else "megabytes sent by all clients",
        template="plotly_white",
        height=440,
        margin={"l": 60, "r": 20, "t": 50, "b": 50},
        hovermode="x unified" if by == "round" else "closest",
    )
    return figure


def html_table(heads: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """A table of text."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in cells
    )
    return f"<div><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem;
        margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.5rem; margin-bottom: .2rem; }}
p {{ color: #555; margin-top: 0; }}
div:has(> table) {{ overflow-x: auto; }}
table {{ border-collapse: collapse; width: 100%; margin: 1.5rem 0; }}
th, td {{ padding: .35rem .6rem; text-align: right; border-bottom: 1px solid #ddd; }}
th:first-child, td:first-child {{ text-align: left; }}
pre {{ background: #f6f6f6; padding: 1rem; overflow: auto; font-size: .85rem; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{facts}</p>
{table}
{charts}
<details><summary>Settings</summary><pre>{settings}</pre></details>
</body>
</html>
"""
