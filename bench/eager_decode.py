"""Decode of a model whose experts do not fit: tokens a second, hits and bytes at 45 % and 25 % residency.

The model has Qwen3-30B-A3B's geometry and random weights; its routing is replayed from held-out text (see
`bench/routing.py`), because random routers would make caches look like nothing a user will see.
`python -m bench.eager_decode --routing routing.safetensors [--checkpoint FOLDER]`
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from bench.decode_case import Case, Measured, Plan, measure_case
from bench.harness import RESULTS, ResultFile, Row
from bench.models.random_checkpoint import add_geometry, ensure_checkpoint, geometry_of
from bench.models.random_geometry import RandomGeometry
from bench.routing import Experts, RecordedRouting, RoutingFacts, static_hit_rate
from hetero_gpu.link import measure_link

DEVICE = "cuda"

CASES = (Case("lru", 0.45), Case("lru", 0.25), Case("lru", 1.0))
EXTRA_CASES = (Case("lfu", 0.45), Case("lfu", 0.25), Case("lfru", 0.45), Case("lfru", 0.25))
PUBLISHED_LRU_HITS = {0.45: "88.5 (LRU, large models, SeqMoE)", 0.25: "74.2 (LRU, large models, SeqMoE)"}


def rows_of(measured: Measured, routing: Experts, *, num_experts: int, link_gb_s: float | None) -> list[Row]:
    """The rows of one case. Times are medians of the repetitions."""
    case = measured.case
    name, percent = case.policy, case.percent
    speed_id = f"main.eager_tok_s_{percent}" if name == "lru" else f"main.eager_{name}_tok_s_{percent}"
    facts = RoutingFacts.of(routing, num_experts)
    note = f"random weights, routing replayed from recorded held-out text; {facts}"
    rows = [
        Row(
            id=speed_id,
            value=measured.tok_s,
            unit="tok/s",
            reference=_link_limit(measured, link_gb_s),
            note=f"{note}; lowest {min(measured.all_tok_s):.3g}, highest {max(measured.all_tok_s):.3g}",
        )
    ]
    if case.residency < 1:
        static = 100 * static_hit_rate(routing, num_experts, case.residency)
        rows.append(
            Row(
                id=f"main.{name}_hit_{percent}",
                value=100 * measured.hit_rate,
                unit="%",
                reference=PUBLISHED_LRU_HITS.get(case.residency) if name == "lru" else None,
                note=f"{facts}; static cache of the most used experts {static:.1f} %",
            )
        )
    return [*rows, *_lru_rows(measured)] if name == "lru" else rows


def _lru_rows(measured: Measured) -> list[Row]:
    """What is reported of the default policy alone."""
    percent = measured.case.percent
    num_tokens = min(measured.ttfts_ms)
    ttft_ms, note = measured.ttft_ms(num_tokens), f"prompt of {num_tokens} tokens"
    rows = [Row(id=f"main.eager_ttft_ms_{percent}", value=ttft_ms, unit="ms", note=note)]
    if measured.case.residency < 1:
        note = "share of decode time in which computation stood waiting for copies"
        stall = 100 * measured.stall_share
        rows += [
            Row(id=f"main.eager_mb_token_{percent}", value=measured.bytes_token / 1e6, unit="MB"),
            Row(id=f"main.eager_stall_{percent}", value=stall, unit="%", note=note),
        ]
    return rows


def ratio_rows(done: Sequence[Measured]) -> list[Row]:
    """Speed of the LRU cases over that of the case with all experts resident."""
    speeds = {measured.case: measured.tok_s for measured in done}
    full = speeds.get(Case("lru", 1.0))
    if full is None:
        return []
    return [
        Row(
            id=f"main.eager_over_resident_{case.percent}",
            value=speed / full,
            unit="ratio",
            reference=f"all experts resident: {full:.3g} tok/s, same orchestrator",
        )
        for case, speed in speeds.items()
        if case.policy == "lru" and case.residency < 1
    ]


def _link_limit(measured: Measured, link_gb_s: float | None) -> str | None:
    """What the link alone would allow for the bytes that were moved."""
    if link_gb_s is None or measured.bytes_token == 0:
        return None
    limit = link_gb_s * 1e9 / measured.bytes_token
    return f"link: {limit:.3g} tok/s ({link_gb_s:.0f} GB/s measured)"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure case by case; what was measured is written even when a later case fails."""
    options = parse(arguments, __doc__)
    plan, routing, geometry = prepare(options)
    link_gb_s = measure_link().pinned if options.device == "cuda" else None
    deadline = time.monotonic() + options.seconds
    done: list[Measured] = []
    try:
        for case in (*CASES, *EXTRA_CASES):
            if case in EXTRA_CASES and time.monotonic() > deadline:
                print(f"left out, no time: {case}", flush=True)
                continue
            done.append(measure_case(plan, case, routing))
            print(done[-1], flush=True)
            free_device()
    finally:
        rows = [row for each in done for row in _rows(each, routing, geometry, link_gb_s)]
        if rows:
            ResultFile.write("eager_decode", [*rows, *ratio_rows(done)], folder=options.results)


def _rows(
    measured: Measured, routing: Experts, geometry: RandomGeometry, link_gb_s: float | None
) -> list[Row]:
    return rows_of(measured, routing, num_experts=geometry.experts, link_gb_s=link_gb_s)


def parse(arguments: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    """The options of the decode benches."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--routing", type=Path, required=True, help="what bench.routing_replay recorded")
    parser.add_argument("--checkpoint", type=Path, default=Path(tempfile.gettempdir()) / "bench-checkpoint")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tokens", type=int, default=128, help="decoded in each repetition")
    parser.add_argument("--prompts", type=int, nargs="+", default=[128], help="lengths, for the TTFT")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=180, help="after that, no extra policy is begun")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    add_geometry(parser)
    return parser.parse_args(arguments)


class Prepared(NamedTuple):
    """What a decode bench measures with. `routing`: `[tokens, layers, top_k]`."""

    plan: Plan
    routing: Experts
    geometry: RandomGeometry


def prepare(options: argparse.Namespace) -> Prepared:
    """The checkpoint of those options, written unless it is there, and the recorded routing laid over it."""
    geometry = geometry_of(options)
    folder = ensure_checkpoint(options.checkpoint, geometry)
    routing = RecordedRouting.load(options.routing).laid_over(
        layers=geometry.layers, experts=geometry.experts, top_k=geometry.top_k
    )
    plan = Plan(folder, options.device, options.tokens, tuple(options.prompts), options.runs)
    return Prepared(plan, routing, geometry)


def free_device() -> None:
    """Give slabs back to the driver: the next memory plan counts what is free there."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
