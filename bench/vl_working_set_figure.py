"""The pictures of `bench.vl_working_set`: VisMMOE's Fig. 1 above, 3 and 4 below."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bench.visual_routing import Floats
from bench.vl_working_set import KEEP_RATIOS, Case, WorkingSet
from hetero_scheduler.compression import METHODS

_COLOURS = {
    "none": "#333333",
    "affinity": "#2f6fb0",
    "saliency": "#d9822b",
    "random": "#b8c0c8",
    "mix": "#3f8f4f",
}
_LINES = {1.0: "-", 0.7: "--", 0.5: "-"}


def draw(sets: Sequence[WorkingSet], path: Path, *, title: str) -> None:
    """Draw all cases into the PNG `path`."""
    by_case = {each.case: each for each in sets}
    plain, kept = by_case[Case("none", 1.0)], by_case[Case("affinity", KEEP_RATIOS[-1])]
    figure = Figure(figsize=(12, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 3)
    _heat(above[0], plain.loads["text"], "text")
    _heat(above[1], plain.loads["visual"], "image, all tokens")
    _heat(above[2], kept.loads["visual"], f"image, {kept.case.keep_ratio:.0%} kept by affinity")
    _coverage(below[0], [plain, *(by_case[Case("affinity", keep)] for keep in KEEP_RATIOS)])
    _experts(below[1], [plain, *(by_case[Case(method, KEEP_RATIOS[-1])] for method in METHODS)])
    _foretold(below[2], [plain, *(by_case[Case("affinity", keep)] for keep in KEEP_RATIOS)])
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=110)


def _heat(axes: Axes, load: Floats, what: str) -> None:
    share = load / np.maximum(load.sum(axis=1, keepdims=True), 1)
    axes.imshow(share, aspect="auto", cmap="Blues", vmin=0, vmax=4 / share.shape[1], interpolation="nearest")
    axes.set_title(f"choices of experts: {what}", fontsize=9)
    _count(axes, "expert")
    axes.set_ylabel("MoE layer", fontsize=8)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def _coverage(axes: Axes, sets: Sequence[WorkingSet]) -> None:
    for each in sets:
        values = each.coverage()
        _line(axes, each.case, np.arange(1, len(values) + 1), values)
    _finish(axes, "choices that the k most chosen take", "k")


def _experts(axes: Axes, sets: Sequence[WorkingSet]) -> None:
    for each in sets:
        _line(axes, each.case, np.arange(len(each.experts)), each.experts)
    axes.axvline(sets[0].prefix - 0.5, color="#333333", linewidth=0.6, linestyle=":")
    _finish(axes, "experts that a prompt activates", "MoE layer")


def _foretold(axes: Axes, sets: Sequence[WorkingSet]) -> None:
    for each in sets:
        values = each.foretold["visual"]
        _line(axes, each.case, np.arange(1, len(values) + 1), values)
    text = sets[0].foretold["text"]
    axes.plot(np.arange(1, len(text) + 1), text, color="#b03030", label="text")
    _finish(axes, "choices foretold one layer early, image tokens", "MoE layer")


def _line(axes: Axes, case: Case, places: Floats | np.ndarray, values: Floats) -> None:
    axes.plot(
        places,
        values,
        color=_COLOURS[case.method],
        linestyle=_LINES[case.keep_ratio],
        label="all tokens" if case.method == "none" else f"{case.method}, {case.keep_ratio:.0%}",
    )


def _finish(axes: Axes, title: str, label: str) -> None:
    axes.set_title(title, fontsize=9)
    _count(axes, label)
    axes.legend(frameon=False, fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def _count(axes: Axes, label: str) -> None:
    axes.set_xlabel(label, fontsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
