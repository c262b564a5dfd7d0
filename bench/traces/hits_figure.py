"""The picture of `bench.traces.hits`: hit rate by residency, a panel for each trace (SeqMoE's Fig. 7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes

from hetero_runtime.picture import new_figure, save_picture

_STYLES = {
    "SeqMoE": ("#2f6fb0", "o", "-"),
    "MoE-Infinity": ("#d9822b", "s", "-"),
    "cache only": ("#3f8f4f", "D", "-"),
    "LRU": ("#b03030", "^", "-"),
    "LFRU": ("#7b5ba6", "v", "-"),
    "LFU": ("#8c6d46", "P", "-"),
    "PrefillHot": ("#77838f", "X", "-"),
    "Belady": ("#333333", "", ":"),
    "Belady-8": ("#333333", "", "--"),
    "next step known": ("#2f6fb0", "", ":"),
}
"""Colour, marker and dashes of each policy; bounds have no marker."""
_WIDTH, _HEIGHT, _LEGEND = 3.7, 4.0, 1.6


def draw_hits(traces: Sequence[tuple[str, Mapping[str, Mapping[int, float]]]], path: Path) -> None:
    """Draw (name, hits in percent by policy and residency in percent) of each trace into the PNG `path`."""
    figure = new_figure((_WIDTH * len(traces) + _LEGEND, _HEIGHT))
    panels = figure.subplots(1, len(traces), sharey=True, squeeze=False)[0]
    for axes, (name, hits) in zip(panels, traces, strict=True):
        _draw_panel(axes, hits)
        axes.set_title(name, fontsize=10)
    panels[0].set_ylabel("hit rate, % of required experts")
    panels[0].set_ylim(top=100)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=9
    )
    save_picture(figure, path)


def _draw_panel(axes: Axes, hits: Mapping[str, Mapping[int, float]]) -> None:
    for policy, (colour, marker, dashes) in _STYLES.items():
        by_percent = hits[policy]
        axes.plot(
            list(by_percent),
            list(by_percent.values()),
            color=colour,
            marker=marker,
            linestyle=dashes,
            markersize=5,
            label=policy,
        )
    axes.set_xticks(list(hits["LRU"]))
    axes.set_xlabel("resident experts, %")
    axes.grid(axis="y", color="#e4e7ea")
    axes.spines[["top", "right"]].set_visible(False)
