"""Hit rate against residency, a line for each policy, a panel for each pool (like SeqMoE's Fig. 3 and 7)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hetero_runtime.picture import new_figure, save_picture
from hetero_runtime.simulation.report import policy_name, trace_line
from hetero_runtime.trace.file import TraceInfo
from hetero_scheduler.simulator import SimulationResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PANEL, _LEGEND = (4.6, 4.4), 2.8
"""Inches: width and height of a panel, and the width that the legend beside them takes."""
_TITLES = {"global": "one pool for all layers", "per_layer": "a pool for each layer"}
_STATIC = "static, knew the load"
# Distinct without colour too: each line has its own marker, and dashes when the colours have run out.
_COLOURS = ("#2f6fb0", "#d9822b", "#3f8f4f", "#b03030", "#7b5ba6", "#2a9d9d", "#8c6d46", "#c2549b")
_MARKERS = "osD^vPX*"


def draw_hit_rates(results: Sequence[SimulationResult], info: TraceInfo, path: Path) -> None:
    """Draw `results` into the PNG `path`.

    Raises ConfigError where matplotlib is missing, DeviceError where `path` cannot be written.
    """
    pools = list(dict.fromkeys(result.scenario.pool for result in results))
    names = list(dict.fromkeys(policy_name(result.scenario) for result in results))
    figure = new_figure((_PANEL[0] * len(pools) + _LEGEND, _PANEL[1]))
    panels = figure.subplots(1, len(pools), sharey=True, squeeze=False)[0]
    for axes, pool in zip(panels, pools, strict=True):
        _draw_panel(axes, [result for result in results if result.scenario.pool == pool], names)
        axes.set_title(_TITLES[pool], fontsize=10)
    panels[0].set_ylabel("hit rate, % of required experts")
    panels[0].set_ylim(top=100)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=9
    )
    figure.suptitle(trace_line(results, info), fontsize=9, x=0.01, horizontalalignment="left")
    save_picture(figure, path)


def _draw_panel(axes: Axes, results: Sequence[SimulationResult], names: list[str]) -> None:
    for number, name in enumerate(names):
        mine = [result for result in results if policy_name(result.scenario) == name]
        axes.plot(
            [100 * result.scenario.residency for result in mine],
            [100 * result.hit_rate for result in mine],
            color=_COLOURS[number % len(_COLOURS)],
            marker=_MARKERS[number % len(_MARKERS)],
            linestyle="-" if number < len(_COLOURS) else "--",
            markersize=5,
            label=name,
        )
    static = {100 * result.scenario.residency: 100 * result.static_hit_rate for result in results}
    axes.plot(list(static), list(static.values()), color="#77838f", linestyle=":", label=_STATIC)
    axes.set_xticks(list(static))
    axes.set_xlabel("resident experts, %")
    axes.grid(axis="y", color="#e4e7ea")
    axes.spines[["top", "right"]].set_visible(False)
