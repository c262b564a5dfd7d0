"""Pictures of committed results: `python -m bench.plots` draws `bench/results/decode.png`."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot

from bench.harness import RESULTS, ResultFile

CASES = (("all", "all resident"), ("45", "45 % resident"), ("25", "25 % resident"))


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
            label = "the link alone, LRU" if percent == "45" else None
            axes.plot([i - 0.4, i + 0.4], [limit, limit], color="#b03030", linestyle="--", label=label)
    axes.set_xticks(range(len(CASES)), [name for _, name in CASES])
    axes.set_ylabel("tokens a second")
    axes.set_yscale("log")
    axes.set_ylim(10, 1500)
    axes.set_title("Decode, Qwen3-30B-A3B geometry, 16 layers, one H200, batch 1", fontsize=10)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    draw_decode()
