"""The captured step, all experts resident: how it grows with the context.

    python -m bench.context_decode --checkpoint FOLDER [--layers 48 --experts 64]

The checkpoint is of Qwen3-30B-A3B's geometry, written unless it is there. A step reads the same bytes however
many experts there are to choose from, so 64 of them, which fit on a smaller disk, say what 128 would.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from bench.decode_case import Case, Plan, load, make_prompt
from bench.harness import RESULTS, ResultFile, Row, attempt
from bench.models.random_checkpoint import add_geometry, ensure_checkpoint, geometry_of
from hetero_runtime.engine import Engine

DEVICE = "cuda"
STEP_TARGET_LAYERS = 48


def step_ms(engine: Engine, present: int, *, tokens: int, runs: int) -> list[float]:
    """ms of a step, the mean of `tokens` after a prompt of `present` tokens, in each of `runs`."""

    def once() -> float:
        answer = engine.generate(make_prompt(present), max_tokens=1 + tokens, ignore_eos=True)
        return 1e3 / answer.timings.tok_s

    return [once() for _ in range(1 + runs)][1:]  # in the first, the kernels of the prompt compile


def rows_of(ms: Mapping[int, list[float]], run: str, layers: int) -> list[Row]:
    """The step by tokens present, without what was not measured.

    `ms`: what `step_ms` gave by tokens present; `run`: geometry and method, for the notes.
    """
    rows, medians = list[Row](), {present: statistics.median(each) for present, each in sorted(ms.items())}
    if len(medians) > 1:
        (short, short_ms), (long, long_ms) = medians.items()
        rows.append(
            Row(
                id=f"graph.ctx{long}_over_{short}",
                value=long_ms / short_ms,
                unit="ratio",
                target="<=1.25",
                reference=f"{short_ms:.4g} ms with {short} tokens present, {long_ms:.4g} ms with {long}",
                note=run,
            )
        )
    if medians:
        present = min(medians)
        spread = f"lowest {min(ms[present]):.4g}, highest {max(ms[present]):.4g}"
        target = "<=3.5" if layers == STEP_TARGET_LAYERS else None
        note = f"{present} tokens present; {run}; {spread}"
        rows.append(
            Row(id=f"graph.step{layers}_ms", value=medians[present], unit="ms", target=target, note=note)
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Load one engine, measure, write. Returns how many measurements failed."""
    options = parse(arguments)
    geometry = geometry_of(options)
    folder = ensure_checkpoint(options.checkpoint, geometry)
    longest = max(options.lengths) + 2 * options.tokens  # with room to spare
    plan = Plan(folder, options.device, options.tokens, (longest,), options.runs)
    case = Case("lru", 1.0, "graph" if options.device == "cuda" else "eager")
    loaded = load(plan, case, None)
    print(f"loaded in {loaded.load_s:.1f} s", flush=True)
    with loaded.engine as engine:
        every = partial(step_ms, engine, tokens=options.tokens, runs=options.runs)
        tried = {
            present: attempt(f"{present} tokens present", partial(every, present))
            for present in sorted(options.lengths)
        }
    ms = {present: each for present, each in tried.items() if each is not None}
    run = (
        f"{geometry.layers} layers of {geometry.experts} experts, top-{geometry.top_k}, random weights, all "
        f"resident, whole engine, {options.tokens} tokens, median of {options.runs}"
    )
    if rows := rows_of(ms, run, geometry.layers):
        ResultFile.write("context_decode", rows, folder=options.results)
    return len(tried) - len(ms)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of this bench."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, default=Path(tempfile.gettempdir()) / "bench-checkpoint")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--lengths", type=int, nargs=2, default=[512, 8192], help="tokens present")
    parser.add_argument("--tokens", type=int, default=64, help="decoded in each repetition")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    add_geometry(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
