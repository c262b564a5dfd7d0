"""What a narrow model's traces are like: evenness, persistence, and what caches without foresight hit.

    python -m bench.traces.facts --flavour matched --shape 48x128 --train train.json SAMPLED HELDOUT

SAMPLED and HELDOUT are compact or whole traces. Rows without `heldout` in their id are of sampled text, as
decoding sees it. Needs no GPU: a cache without prefetches depends on what was chosen, not on time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.harness import RESULTS, ResultFile, Row
from bench.traces.compact import read_compact
from bench.traces.shapes import LRU_TOLERANCE, MIN_ENTROPY, PUBLISHED_LRU, SHAPES
from hetero_runtime.trace import RoutingFacts, TraceInfo
from hetero_scheduler.simulator import Scenario, SimulationResult, simulate
from hetero_scheduler.trace import Trace

RESIDENCIES = (0.15, 0.25, 0.35, 0.45)
POLICIES = {
    "lru": "lru",
    "lfu": "lfu",
    "lfru": "lfru",
    "belady": "oracle_belady",
    "belady8": "oracle_belady_8",
}
PAPER_LRU = {15: "60.0", 25: "74.2", 35: "84.5", 45: "88.5"}
"""SeqMoE §9.3, the mean of four big models."""
MAIN_SHAPE = "48x128"
FLAVOURS = ("natural", "matched")


def row_prefix(flavour: str, shape: str) -> str:
    """Beginning of the ids of a model's rows: the main shape goes without its name."""
    return f"predict.{flavour}_" + ("" if shape == MAIN_SHAPE else f"{shape}_")


def fact_rows(trace: Trace, info: TraceInfo, *, prefix: str, is_matched: bool, note: str = "") -> list[Row]:
    """Load entropy, persistence, hits of a cache that never changes and of each policy, by residency."""
    facts = RoutingFacts.of(trace)
    decoding = f"{info.decoding} at {info.temperature:g}" if info.decoding == "sampled" else info.decoding
    about = f"{decoding}, {trace.num_tokens} tokens, {len(trace.bounds) - 1} documents"
    rows = [
        Row(
            id=f"{prefix}entropy",
            value=facts.load_entropy,
            unit="ratio",
            target=f">={MIN_ENTROPY}",
            note=f"{about}; {note}" if note else about,
        ),
        Row(
            id=f"{prefix}persistence",
            value=100 * facts.persistence,
            unit="%",
            reference=f"by chance {100 * facts.by_chance:.1f}",
        ),
    ]
    for result in _replays(trace):
        rows += _hit_rows(result, prefix=prefix, is_matched=is_matched)
    return rows


def _replays(trace: Trace) -> list[SimulationResult]:
    """Every policy at every residency, one pool for all layers; the replays run side by side."""
    scenarios = [
        Scenario(eviction=policy, residency=residency)
        for policy in POLICIES.values()
        for residency in RESIDENCIES
    ]
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda scenario: simulate(trace, scenario), scenarios))


def _hit_rows(result: SimulationResult, *, prefix: str, is_matched: bool) -> list[Row]:
    """One row; for LRU what a static cache hits too, and on a matched trace how far off the hits are."""
    residency = result.scenario.residency
    percent, hits = round(100 * residency), 100 * result.hit_rate
    policy = next(name for name, known in POLICIES.items() if known == result.scenario.eviction)
    if policy != "lru":
        return [Row(id=f"{prefix}{policy}_{percent}", value=hits, unit="%")]
    static = 100 * result.static_hit_rate
    reference = f"{PAPER_LRU[percent]} (SeqMoE §9.3, four big models)"
    rows = [
        Row(id=f"{prefix}lru_{percent}", value=hits, unit="%", reference=reference),
        Row(id=f"{prefix}static_{percent}", value=static, unit="%", note="a cache that never changes"),
    ]
    if is_matched and residency in PUBLISHED_LRU:
        wanted = PUBLISHED_LRU[residency]
        rows.append(
            Row(
                id=f"{prefix}lru_{percent}_off",
                value=abs(hits - wanted),
                unit="points",
                target=f"<={LRU_TOLERANCE:g}",
                reference=f"LRU hits {hits:.1f} %, wanted {wanted:g}",
            )
        )
    return rows


def training_note(summary: dict[str, Any]) -> str:
    """What routing was trained on and for, in words: kinds of text, terms of the loss, last coefficients."""
    last, wants = summary["looks"][-1], summary["wants"]
    terms = [f"balance {last['balance']:.2g}"]
    if wants["lru"] is not None:
        wanted = "/".join(f"{hit:g}" for hit in wants["lru"])
        names = [name for name in ("consistency", "departure", "novelty") if name in last]
        pulls = "temporal " + ", ".join(f"{name} {last[name]:.2g}" for name in names)
        terms.append(f"{pulls} steered to LRU hits {wanted} %")
    if wants["foreseen"] is not None:
        wanted = f"{100 * wants['foreseen']:g} % of experts foreseen {wants['ahead']} ahead"
        terms.append(f"foresight {last['foresight']:.2g} steered to {wanted} by a companion")
    tokens = summary["progress"]["tokens"] / 1e6
    text = f"{tokens:.0f} M tokens ({', '.join(summary['kinds'])})"
    return f"trained on {text}, router terms: {', '.join(terms)}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure both traces and keep the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sampled", type=Path)
    parser.add_argument("heldout", type=Path)
    parser.add_argument("--flavour", choices=FLAVOURS, required=True)
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--train", type=Path, required=True, help="train.json of the model")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    note = training_note(json.loads(options.train.read_text(encoding="utf-8")))
    prefix, is_matched = row_prefix(options.flavour, options.shape), options.flavour == "matched"
    rows = []
    for path, part in ((options.sampled, ""), (options.heldout, "heldout_")):
        trace, info = read_compact(path)
        rows += fact_rows(trace, info, prefix=prefix + part, is_matched=is_matched, note=note)
    ResultFile.write(f"traces_{options.shape}_{options.flavour}", rows, folder=options.results)


if __name__ == "__main__":
    main()
