"""Whether the host waits for the device while it submits captured steps: `python -m bench.host_syncs`.

The bundled model, a quarter of its experts resident, for each preset whose decode step is one CUDA graph.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench.decode_case import SHORT_PROMPT, make_prompt
from bench.harness import RESULTS, ResultFile, Row, attempt
from bench.sync_counts import SyncCounts, syncs_counted
from hetero_runtime.engine import Engine

DEVICE = "cuda"
PRESETS = ("lru", "seqmoe", "psr")
RESIDENCY = 0.25


def count_syncs(preset: str, *, tokens: int) -> SyncCounts:
    """Of `tokens` decode steps, without the prompt's pass."""
    words = {"memory": {"residency": RESIDENCY}, "execution": {"mode": "graph", "max_rows": 1}}
    with Engine.load(preset=preset, device=DEVICE, **words) as engine:
        deltas = engine.stream(make_prompt(SHORT_PROMPT), max_tokens=1 + tokens, ignore_eos=True)
        next(deltas)
        with syncs_counted() as counts:
            for _ in deltas:
                pass
    return counts


def row_of(preset: str, counts: SyncCounts) -> Row:
    """`graph.host_syncs` for LRU; other presets add their name."""
    what = f"while {counts.num_steps} steps are submitted, sampling included; {counts.elsewhere} elsewhere"
    return Row(
        id="graph.host_syncs" + ("" if preset == "lru" else f"_{preset}"),
        value=counts.in_submissions,
        unit="syncs",
        target="==0",
        note=f"{what}; bundled model, {100 * RESIDENCY:.0f} % resident, preset {preset}",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Count, write. Returns how many presets failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    options = parser.parse_args(arguments)
    counted = {name: attempt(name, partial(count_syncs, name, tokens=options.tokens)) for name in PRESETS}
    rows = [row_of(name, counts) for name, counts in counted.items() if counts and counts.num_steps]
    if rows:
        ResultFile.write("host_syncs", rows, folder=options.results)
    return len(PRESETS) - len(rows)


if __name__ == "__main__":
    sys.exit(main())
