"""Hit rates on the kept traces, policy by policy and residency by residency, like SeqMoE's Fig. 7.

    python -m bench.traces.hits [--traces 48x128-matched ...] [--documents 4]

The imagined machine holds block-fp8 experts of Qwen3-30B-A3B behind a 55 GB/s link (`simulated_bundled`). Our
own policy is what serves a GPU in eager mode: Mamba2 forecasts, made anew as the step's token and the next
layer's router are known, JSD prefetch, forecast-driven eviction. It is held against caches without foresight,
the same forecasts without prefetches and under MoE-Infinity's schedule, and bounds: Belady's, which prefetch
nothing, and the same pipeline knowing the next step perfectly over the same link.

A copy on the link is finished before what a layer demands, as in the paper. Rows that end with `captured` are
of our policy as it is in captured steps: forecasts a step ahead, and copies in pieces, which a demand
overtakes, so that fewer are there before they are needed, and a token takes less time.

The kept traces hold what routers say early for sampled text, so that is what is replayed; predictors were
trained on other text. Counts do not depend on the machine that replays them. Needs no GPU; all documents
of the three traces take two cores four minutes, side by side.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bench.harness import RESULTS, ResultFile, Row
from bench.simulated_bundled import MACHINE
from bench.traces.compact import first_documents, read_compact
from bench.traces.facts import PAPER_LRU, row_prefix
from bench.traces.hits_figure import draw_hits
from hetero_runtime.config.tree import Horizon
from hetero_runtime.prediction import RouterFingerprint, StoredPredictor, read_predictor
from hetero_runtime.prediction.horizons import predictors_of
from hetero_runtime.simulation.report import machine_line, trace_line
from hetero_scheduler.predict.routing import shares
from hetero_scheduler.simulator import Machine, Scenario, SimulationResult, simulate
from hetero_scheduler.simulator.foreseen import Foreseen
from hetero_scheduler.trace import Trace

KEPT = Path(__file__).resolve().parent / "kept"
TRACES = ("48x128-matched", "48x128-natural", "24x32-natural")
RESIDENCIES = (0.15, 0.25, 0.35, 0.45)
OURS, CAPTURED, ORACLE = "SeqMoE", "SeqMoE captured", "next step known"
FORESIGHT = {OURS: "jsd", "MoE-Infinity": "moe_infinity", "cache only": "none", ORACLE: "jsd"}
"""Policies that act on forecasts, and their schedules."""
CACHES = {
    "LRU": "lru",
    "LFU": "lfu",
    "LFRU": "lfru",
    "Belady": "oracle_belady",
    "Belady-8": "oracle_belady_8",
}
HOT = "PrefillHot"
RIVALS = ("LRU", "LFU", "LFRU", HOT, "cache only", "MoE-Infinity")
PAPER = {15: 84.6, 25: 91.7, 35: 95.1, 45: 97.0}
"""SeqMoE §9.3, the mean of four big models."""
GAP_CLOSED = 0.6

Hits = dict[str, dict[int, float]]


@dataclass(frozen=True)
class TraceHits:
    """What was found on one trace. `hits`: percent of the required experts, by policy and residency in
    percent. `details`: of our own policy in both modes, by residency."""

    name: str
    about: str
    hits: Hits
    details: dict[str, dict[int, str]]

    @property
    def prefix(self) -> str:
        """Beginning of the ids of its rows; the matched trace's go without a name."""
        shape, flavour = self.name.split("-")
        return row_prefix(flavour, shape).replace("matched_", "")

    def gap_closed(self, percent: int) -> float:
        """Of the way from LRU to the same pipeline with a perfect next step."""
        lru, ours, oracle = (self.hits[policy][percent] for policy in ("LRU", OURS, ORACLE))
        return (ours - lru) / (oracle - lru)


def replay_traces(folders: Sequence[Path], documents: int | None) -> list[TraceHits]:
    """`replay_trace` of each, side by side; one alone needs no process of its own."""
    if len(folders) == 1:
        return [replay_trace(folders[0], documents)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(folders), mp_context=context) as pool:
        return list(pool.map(replay_trace, folders, [documents] * len(folders)))


def replay_trace(folder: Path, documents: int | None) -> TraceHits:
    """Every policy at every residency on the sampled trace in `folder`."""
    trace, info = read_compact(folder / "sampled.trace.xz")
    if documents is not None:
        trace = first_documents(trace, documents)
    stored = read_predictor(folder / "predictor.safetensors", RouterFingerprint.of_trace(trace, info))
    began = time.perf_counter()
    ours = Foreseen(predictors_of(stored, 1, nearest=nearest_of(stored))[0], trace)
    oracle = knowing_next(ours, trace)
    results = {
        policy: [
            simulate(trace, scenario, predictor=oracle if policy == ORACLE else ours)
            for scenario in _scenarios("belady", schedule)
        ]
        for policy, schedule in FORESIGHT.items()
    }
    results[CAPTURED] = [
        simulate(trace, scenario, predictor=a_step_ahead(ours))
        for scenario in _scenarios("belady", FORESIGHT[OURS], replace(MACHINE, overtakes=True))
    ]
    results |= {
        policy: [simulate(trace, scenario) for scenario in _scenarios(eviction)]
        for policy, eviction in CACHES.items()
    }
    hits: Hits = {
        policy: {_percent(each): 100 * each.hit_rate for each in found} for policy, found in results.items()
    }
    first = trace.num_tokens - results[OURS][0].tokens
    hits[HOT] = {
        _percent(each): 100 * prefill_hot(trace, num_slots=each.num_slots, prompt=info.cut, first=first)
        for each in results[OURS]
    }
    print(f"{folder.name}: replayed in {time.perf_counter() - began:.0f} s", flush=True)
    about = (
        f"{trace_line(results[OURS], info)}, {len(trace.bounds) - 1} documents; {machine_line(results[OURS])}"
    )
    details = {
        policy: {_percent(each): _detail(each) for each in results[policy]} for policy in (OURS, CAPTURED)
    }
    return TraceHits(folder.name, about, hits, details)


def nearest_of(stored: StoredPredictor) -> Horizon:
    """What `prediction.horizon: auto` is on a GPU in eager mode: the nearest that was learned."""
    if stored.refinement is None:
        return "step"
    return "token" if stored.refinement.pool is None else "layer"


def a_step_ahead(foreseen: Foreseen) -> Foreseen:
    """`foreseen`, which makes nothing anew."""
    plain = copy.copy(foreseen)
    plain.known = plain.early = None
    plain.asks_early = False
    return plain


def knowing_next(foreseen: Foreseen, trace: Trace) -> Foreseen:
    """`foreseen` with the truth for every next step, told a step ahead; later steps stay as they were."""
    oracle = a_step_ahead(foreseen)
    oracle.steps = foreseen.steps.copy()
    oracle.steps[:-1, 0] = shares(trace.logits[1:], trace.topk[1:])
    oracle.steps[trace.bounds[1:] - 1, 0] = 0  # beyond the end of a document there is nothing
    return oracle


def prefill_hot(trace: Trace, *, num_slots: int, prompt: int, first: int) -> float:
    """Hits of a cache that keeps what each document's first `prompt` tokens used most, ties to the first.

    Counted is what comes behind the prompts, from token `first` on (SeqMoE §9.3).
    """
    num_hits = num_required = 0
    key = trace.topk.astype(np.int64) + trace.num_experts * np.arange(trace.num_layers)[:, None]
    for begin, end in zip(trace.bounds[:-1], trace.bounds[1:], strict=True):
        uses = np.bincount(
            key[begin : begin + prompt].ravel(), minlength=trace.num_layers * trace.num_experts
        )
        is_kept = np.zeros(uses.size, dtype=np.bool_)
        is_kept[np.argsort(-uses, kind="stable")[:num_slots]] = True
        decoded = key[max(begin + prompt, first) : end]
        num_hits += int(is_kept[decoded].sum())
        num_required += decoded.size
    return num_hits / num_required


def _scenarios(eviction: str, schedule: str = "none", machine: Machine = MACHINE) -> list[Scenario]:
    predictor = "none" if eviction in CACHES.values() else "foreseen"
    return [
        Scenario(
            eviction=eviction, schedule=schedule, predictor=predictor, residency=residency, machine=machine
        )
        for residency in RESIDENCIES
    ]


def _percent(result: SimulationResult) -> int:
    return round(100 * result.scenario.residency)


def _detail(result: SimulationResult) -> str:
    counts = result.counts
    moved = (counts.prefetches + counts.misses) / result.tokens
    return (
        f"late {100 * counts.late / counts.required:.1f} %, full load {100 * result.full_load_share:.1f} %, "
        f"{moved:.1f} experts moved a token, {counts.prefetches_wasted / result.tokens:.1f} for nothing"
    )


# ---- rows


def rows_of(found: TraceHits) -> list[Row]:
    """Hits by residency, the share of the gap that is closed, and whether ours is above all others."""
    is_matched = found.prefix == "predict."
    rows = []
    for percent, hit in found.hits[OURS].items():
        beside = ", ".join(
            f"{policy} {hits[percent]:.1f}" for policy, hits in found.hits.items() if policy != OURS
        )
        paper = f"; SeqMoE §9.3: {PAPER[percent]}, LRU {PAPER_LRU[percent]}" if is_matched else ""
        rows.append(
            Row(
                id=f"{found.prefix}hit_{percent}",
                value=hit,
                unit="%",
                target=f">={PAPER[percent]}" if is_matched else None,
                reference=beside + paper,
                note=f"{found.details[OURS][percent]}; {found.about}",
            )
        )
    rows += [
        Row(
            id=f"{found.prefix}hit_{percent}_captured",
            value=hit,
            unit="%",
            reference=f"eager {found.hits[OURS][percent]:.1f}",
            note=f"forecasts a step ahead, demands overtake copies; {found.details[CAPTURED][percent]}",
        )
        for percent, hit in found.hits[CAPTURED].items()
    ]
    rows += [_gap_row(found, percent) for percent in (25, 45)]
    return [*rows, _above_row(found)]


def _gap_row(found: TraceHits, percent: int) -> Row:
    lru, oracle = found.hits["LRU"][percent], found.hits[ORACLE][percent]
    return Row(
        id=f"{found.prefix}gap_closed_{percent}",
        value=found.gap_closed(percent),
        unit="ratio",
        target=f">={GAP_CLOSED}" if found.name == "48x128-natural" else None,
        reference=f"0 is LRU, {lru:.1f} %; 1 the same pipeline with the next step known, {oracle:.1f} %",
        note=found.about,
    )


def _above_row(found: TraceHits) -> Row:
    """`value`: share of the comparisons, one a rival and residency, in which ours hits more."""
    lost = [
        f"{policy} at {percent} %"
        for policy in RIVALS
        for percent, hit in found.hits[policy].items()
        if found.hits[OURS][percent] <= hit
    ]
    count = len(RIVALS) * len(RESIDENCIES)
    return Row(
        id=f"{found.prefix}above_all",
        value=(count - len(lost)) / count,
        unit="ratio",
        target="==1",
        reference=f"{count} comparisons, with {', '.join(RIVALS)} at each residency",
        note=("not above " + ", ".join(lost) + "; " if lost else "") + found.about,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Replay, print, keep the rows and the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kept", type=Path, default=KEPT, help="folder of the traces' folders")
    parser.add_argument("--traces", nargs="+", default=TRACES, help="names of folders, SHAPE-FLAVOUR")
    parser.add_argument("--documents", type=int, help="the first so many; all unless given")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    found = replay_traces([options.kept / name for name in options.traces], options.documents)
    ResultFile.write("trace_hits", [row for each in found for row in rows_of(each)], folder=options.results)
    draw_hits([(each.name, each.hits) for each in found], options.results / "trace_hits.png")


if __name__ == "__main__":
    main()
