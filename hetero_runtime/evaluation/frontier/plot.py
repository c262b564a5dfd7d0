"""Divergence against copies, a line for each family of policies (like PSR's Fig. 1 and 5)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hetero_runtime.evaluation.frontier.base import Point
from hetero_runtime.picture import new_figure, save_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PANEL, _LEGEND = (4.4, 3.6), 2.6
"""Inches: width and height of a panel, and the width that the legend beside them takes."""
_COPIES = {"demand copies a token (waited for)": "demanded", "all copies a token": "copies"}
_TIMES = {"engine, ms a token": "engine_ms"}
_COLOURS = ("#2f6fb0", "#d9822b", "#3f8f4f", "#b03030", "#7b5ba6", "#2a9d9d", "#8c6d46", "#c2549b")
_MARKERS = "osD^vPX*"


def draw_frontier(points: Sequence[Point], path: Path, *, title: str) -> None:
    """Draw `points` into the PNG `path`: a row of panels for each residency.

    Points without divergence lie at the foot of the logarithmic axis. Raises ConfigError where matplotlib is
    missing, DeviceError where `path` cannot be written.
    """
    residencies = list(dict.fromkeys(point.residency for point in points))
    families = list(dict.fromkeys(point.contender.family for point in points))
    measures = _COPIES | (_TIMES if any(point.engine_ms is not None for point in points) else {})
    size = (_PANEL[0] * len(measures) + _LEGEND, _PANEL[1] * len(residencies))
    figure = new_figure(size)
    panels = figure.subplots(len(residencies), len(measures), sharey=True, squeeze=False)
    for row, residency in zip(panels, residencies, strict=True):
        mine = [point for point in points if point.residency == residency]
        for axes, (label, measure) in zip(row, measures.items(), strict=True):
            _draw_panel(axes, mine, families, measure)
            axes.set_xlabel(label, fontsize=9)
            axes.set_title(f"{residency:.0%} resident", fontsize=10)
        row[0].set_ylabel("KL from the exact model, nats a token", fontsize=9)
    figure.legend(
        *panels[0][0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=9
    )
    figure.suptitle(title, fontsize=9, x=0.01, horizontalalignment="left")
    save_picture(figure, path)


def _draw_panel(axes: Axes, points: Sequence[Point], families: list[str], measure: str) -> None:
    positive = [point.kl for point in points if point.kl > 0]
    floor = min(positive, default=1e-6) / 2
    for number, family in enumerate(families):
        mine = [
            point
            for point in points
            if point.contender.family == family and getattr(point, measure) is not None
        ]
        axes.plot(
            [getattr(point, measure) for point in mine],
            [max(point.kl, floor) for point in mine],
            color=_COLOURS[number % len(_COLOURS)],
            marker=_MARKERS[number % len(_MARKERS)],
            linestyle="-" if number < len(_COLOURS) else "--",
            markersize=5,
            label=family,
        )
    axes.set_yscale("log")
    axes.set_xlim(left=0)
    axes.grid(color="#e4e7ea")
    axes.spines[["top", "right"]].set_visible(False)
