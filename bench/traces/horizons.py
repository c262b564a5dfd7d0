"""What each horizon of a forecast adds on a narrow model's trace: recall, hits, what is moved for nothing.

    python -m bench.traces.horizons TRACE PREDICTOR --flavour matched --shape 48x128 [--documents 4]

TRACE was recorded, or kept, with what routers say early; PREDICTOR is what `bench.traces.learn` wrote. Needs
no GPU: a token of 48 layers takes a CPU core a fortieth of a second, and every horizon is replayed at two
residencies.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.harness import RESULTS, ResultFile
from bench.horizons_bundled import hit_rows, recall_rows
from bench.traces.compact import first_documents, read_compact
from bench.traces.facts import FLAVOURS, row_prefix
from bench.traces.shapes import SHAPES
from hetero_runtime.prediction import RouterFingerprint, read_predictor


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, keep the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("predictor", type=Path)
    parser.add_argument("--flavour", choices=FLAVOURS, required=True)
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--documents", type=int, help="the first so many; all unless given")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    trace, info = read_compact(options.trace)
    if options.documents is not None:
        trace = first_documents(trace, options.documents)
    stored = read_predictor(options.predictor, RouterFingerprint.of_trace(trace, info))
    # rows of the predictor alone are of held-out text; these are of the trace that decoding sees
    prefix = row_prefix(options.flavour, options.shape).replace("matched_", "") + "replayed_"
    rows = recall_rows(stored, trace, prefix=prefix) + hit_rows(stored, trace, info, prefix=prefix)
    ResultFile.write(f"horizons_{options.shape}_{options.flavour}", rows, folder=options.results)


if __name__ == "__main__":
    main()
