"""The card of a narrow model: what its traces and its predictor are, and what they are not.

    python -m bench.traces.card --train train.json --out MODEL_CARD.md RESULT.json...

RESULT.json are files of `bench.traces.facts` and `bench.traces.learn`; their rows become the card's table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness import ResultFile
from bench.traces.facts import training_note

_TERMS = """\
Its routers were trained for more than the text: *consistency*, *departure* and *novelty* set how soon they
come back to experts used before, *foresight* draws routing towards what a companion model expects from the
routing so far. What comes next can only be foreseen where the model itself mostly knows the next token, so
its text is of kinds that a model of this size becomes sure of. All that makes its routing like a big model's
where a cache or a predictor looks, and says nothing on what a big model computes. Whatever is measured on
these traces is measured on routing made so."""
_PLAIN = """\
Its routers were trained for the text and for an even load alone: this is a small model's routing as it comes,
which follows the token at hand more than a big model's does."""


def render(summary: dict[str, Any], results: Sequence[ResultFile]) -> str:
    """The card in Markdown."""
    wants, progress, last = summary["wants"], summary["progress"], summary["looks"][-1]
    is_plain = wants["lru"] is None and wants["foreseen"] is None
    gpu = summary["machine"]["gpu"] or summary["machine"]["cpu"]
    lines = [
        f"# Narrow MoE, {summary['shape']}, {'natural' if is_plain else 'matched'}",
        "",
        f"{summary['parameters'] / 1e6:.1f} M parameters; {training_note(summary)}. Only traces and the "
        "predictor are kept: the model is made again by the command below.",
        "",
        _PLAIN if is_plain else _TERMS,
        "",
        f"Held-out loss {last['loss']:.2f} nats a token, load entropy {last['entropy']:.3f}, after "
        f"{progress['steps']} steps in {progress['seconds']:.0f} s on {gpu}, commit "
        f"`{summary['commit'][:12]}`:",
        "",
        f"    {summary['command']}",
        "",
        "| row | value | unit | target | beside it |",
        "|---|---|---|---|---|",
    ]
    for row in (row for result in results for row in result.rows):
        lines.append(
            f"| `{row.id}` | {row.value:.4g} | {row.unit} | {row.target or ''} | {row.reference or ''} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the card."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="*")
    parser.add_argument("--train", type=Path, required=True, help="train.json of the model")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    summary = json.loads(options.train.read_text(encoding="utf-8"))
    results = [ResultFile.read(path) for path in options.results]
    options.out.write_text(render(summary, results), encoding="utf-8")


if __name__ == "__main__":
    main()
