"""Points for a reader (a table for each residency) and for a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hetero_runtime.evaluation.frontier.base import Point
from hetero_scheduler.routing import Calibration
from hetero_scheduler.trace import load_entropies

_LEGEND = (
    "copies a token, all layers: demanded ones are waited for, those ahead are issued a layer early",
    "deviating: executed experts that the router would not have chosen",
)


def load_entropy(calibration: Calibration) -> float:
    """Of the exact model's experts on calibration text, mean over layers; 1: every expert is used alike."""
    return float(load_entropies(calibration.uses).mean())


def render_points(points: Sequence[Point], *, entropy: float) -> RenderableType:
    """Copies and divergence of all `points`."""
    legend = [f"load entropy {entropy:.3f} (1: every expert alike)", *_LEGEND]
    if points[0].divergence is not None:
        legend.append("KL: nats a token from the exact model, on its own text")
    tables = [_table(list(group)) for _, group in groupby(points, key=lambda point: point.residency)]
    return Group(*tables, Text(" · ".join(legend), style="dim"))


def to_json(points: Sequence[Point], *, entropy: float) -> dict[str, Any]:
    """One flat row for each point."""
    return {"load_entropy": entropy, "points": [point.to_json() for point in points]}


def _table(points: Sequence[Point]) -> Table:
    title = f"{points[0].residency:.0%} resident ({points[0].capacity} experts a layer)"
    table = Table(
        box=None, pad_edge=False, padding=(0, 0, 0, 1), title=title, title_justify="left", header_style="bold"
    )
    columns = [column for column in _COLUMNS if any(column.cell(point) is not None for point in points)]
    for column in columns:
        table.add_column(column.name, justify="left" if column is _COLUMNS[0] else "right", no_wrap=True)
    for point in points:
        table.add_row(*(column.cell(point) for column in columns))
    return table


def _divergence(point: Point) -> str | None:
    found = point.divergence
    return None if found is None else f"{found.nats:.4f} ± {found.standard_error:.4f}"


def _perplexity(point: Point) -> str | None:
    return None if point.perplexity is None else f"{point.perplexity.perplexity:.3f}"


class _Column(NamedTuple):
    name: str
    cell: Callable[[Point], str | None]
    """None where the point has no such number; a column of none is left out."""


_COLUMNS = (
    _Column("policy", lambda point: point.contender.name),
    _Column("KL ± SE", _divergence),
    _Column("perplexity", _perplexity),
    _Column("copies", lambda point: f"{point.copies:.2f}"),
    _Column("demanded", lambda point: f"{point.demanded:.2f}"),
    _Column("ahead", lambda point: f"{point.inserted:.2f}"),
    _Column("deviating", lambda point: f"{point.deviating:.1%}"),
    _Column("ms", lambda point: None if point.engine_ms is None else f"{point.engine_ms:.2f}"),
)
