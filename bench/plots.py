"""Pictures of committed results: `python -m bench.plots` draws those whose numbers are there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot
from matplotlib.axes import Axes

from bench.harness import RESULTS, ResultFile

CASES = (("all", "all resident"), ("45", "45 % resident"), ("25", "25 % resident"))


STEP_KINDS = (
    ("experts", "experts", "#2f6fb0"),
    ("attention", "attention", "#3f9a9a"),
    ("products", "products outside experts", "#7fb069"),
    ("small", "norms, routers, sampling", "#c9b458"),
    ("predictor", "predictor", "#c77fb4"),
    ("routing", "routing policy", "#8c6d46"),
    ("tables", "tables", "#8d6bb0"),
    ("misses", "loading of misses", "#b03030"),
    ("other", "other", "#d98f8f"),
    ("idle", "idle between kernels", "#b8c0c8"),
    ("host", "waiting for the host", "#77838f"),
)
"""Kinds of `bench.step_time` from bottom to top, with label and colour."""


def draw_decode(folder: Path = RESULTS, out: Path = RESULTS / "decode.png") -> None:
    """Decode speed of the eager and the captured step by residency, with what the link alone would allow."""
    values = {
        row.id: row.value
        for name in ("eager_decode", "graph_decode")
        for row in ResultFile.read(folder / f"{name}.json").rows
    }
    mpl.use("Agg")
    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    for offset, (label, prefix, colour) in enumerate(
        (("eager", "main.eager_tok_s", "#77838f"), ("one CUDA graph", "graph.tok_s", "#2f6fb0"))
    ):
        heights = [values[f"{prefix}_{percent}"] for percent, _ in CASES]
        places = [i + 0.36 * (offset - 0.5) for i in range(len(CASES))]
        bars = axes.bar(places, heights, width=0.34, label=label, color=colour)
        axes.bar_label(bars, fmt="%.0f", label_type="center", color="white")
    for i, (percent, _) in enumerate(CASES):
        share = values.get(f"graph.over_link_{percent}")
        if share is not None:
            limit = values[f"graph.tok_s_{percent}"] / share
            limit_label = "the link alone, LRU" if percent == "45" else None
            axes.plot([i - 0.4, i + 0.4], [limit, limit], color="#b03030", linestyle="--", label=limit_label)
    axes.set_xticks(range(len(CASES)), [name for _, name in CASES])
    axes.set_ylabel("tokens a second")
    axes.set_yscale("log")
    axes.set_ylim(10, 1500)
    axes.set_title("Decode, Qwen3-30B-A3B geometry, 16 layers, one H200, batch 1", fontsize=10)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=110)


def draw_step_breakdown(folder: Path = RESULTS, out: Path | None = None) -> None:
    """Time of a decode step by kind of work, a bar for each residency that was measured.

    Twice: without the loading of misses, so that the rest can be told apart, and with it.
    """
    values = {row.id: row.value for row in ResultFile.read(folder / "step_breakdown.json").rows}
    mpl.use("Agg")
    figure, (without, whole) = pyplot.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    _stack(without, values, [kind for kind in STEP_KINDS if kind[0] != "misses"])
    without.set_title("without the loading of misses", fontsize=10)
    _stack(whole, values, STEP_KINDS)
    whole.set_title("the whole step", fontsize=10)
    handles, labels = whole.get_legend_handles_labels()
    whole.legend(handles[::-1], labels[::-1], frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.suptitle("One captured decode step, Qwen3-30B-A3B geometry, one H200, batch 1", fontsize=11)
    figure.savefig(out or folder / "step_breakdown.png", dpi=110)
    pyplot.close(figure)


def _stack(axes: Axes, values: Mapping[str, float], kinds: Sequence[tuple[str, str, str]]) -> None:
    """One bar a case, `kinds` from bottom to top, the sum on top."""
    cases = [(percent, name) for percent, name in CASES if f"breakdown.total_us_{percent}" in values]
    bottoms = [0.0] * len(cases)
    for kind, label, colour in kinds:
        heights = [values[f"breakdown.{kind}_us_{percent}"] / 1e3 for percent, _ in cases]
        if any(heights):
            axes.bar(range(len(cases)), heights, width=0.6, bottom=bottoms, label=label, color=colour)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for i, total in enumerate(bottoms):
        axes.text(i, total, f"{total:.2f} ms", ha="center", va="bottom")
    axes.set_xticks(range(len(cases)), [name for _, name in cases])
    axes.set_ylabel("ms a step")
    axes.margins(y=0.1)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Draw what the committed results have numbers for."""
    draw_decode()
    if (RESULTS / "step_breakdown.json").is_file():
        draw_step_breakdown()


if __name__ == "__main__":
    main()
