"""Decode with forecasts as a share of full load: a trained model's routing over Qwen3-30B-A3B's geometry.

    python -m bench.predicted_decode KEPT.trace.xz PREDICTOR --layers 24 [--experts-format fp8]

The trace and the predictor are those of a narrow model (`bench/traces`); weights are random, so bytes and
kernels are the large model's, and what routers say is the trace's. A model of half the trace's layers is
served by the predictor's first group. LRU stands beside `preset: seqmoe` at every residency, and the bound:
what the link alone allows for the bytes that Belady's optimum would still move.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bench.decode_case import Case, Measured, Plan, measure_loaded, opened
from bench.eager_decode import free_device
from bench.harness import RESULTS, ResultFile, Row, attempt
from bench.models.random_checkpoint import add_geometry, ensure_checkpoint, geometry_of
from bench.traces.compact import read_compact
from bench.traces.routers import replay_routers
from hetero_gpu.link import measure_link
from hetero_runtime.plan.geometry import read_geometry
from hetero_runtime.prediction import RouterFingerprint, read_predictor, write_predictor
from hetero_runtime.simulation import Sweep, run_sweep
from hetero_runtime.trace import RoutingFacts
from hetero_scheduler.predict.routing import layer_groups
from hetero_scheduler.trace import Trace

RESIDENCIES = (0.15, 0.25, 0.35, 0.45)
TARGET = {("fp8", 0.45): ">=0.80"}
FULL = Case("lru", 1.0)


class Bound(NamedTuple):
    """What Belady's optimum moves a token, and how long the link takes for it."""

    hit_rate: float
    seconds: float


def cut(trace: Trace, layers: int) -> Trace:
    """The first `layers` of `trace`."""
    return replace(trace, logits=trace.logits[:, :layers], topk=trace.topk[:, :layers], early=None)


def fitted(predictor: Path, model: RouterFingerprint, folder: Path) -> Path:
    """A copy of `predictor`, as far as its groups reach, that `model` accepts.

    Raises ValueError where the model ends inside a group.
    """
    stored = read_predictor(predictor)
    ends = [group.stop for group in layer_groups(stored.fingerprint.num_layers)]
    if model.num_layers not in ends:
        raise ValueError(f"{model.num_layers} layers; the predictor's groups end with {ends}")
    models = stored.models[: ends.index(model.num_layers) + 1]
    path = folder / "fitted.predictor.safetensors"
    write_predictor(path, models, fingerprint=model, notes=stored.notes)
    return path


def bound_of(trace: Trace, residency: float, *, record_bytes: int, link_gb_s: float) -> Bound:
    """Of the whole trace, whatever is prefetched."""
    (result,) = run_sweep(trace, Sweep(residencies=(residency,), evictions=("oracle_belady",)))
    moved = (1 - result.hit_rate) * trace.num_layers * trace.top_k * record_bytes
    return Bound(result.hit_rate, moved / (1e9 * link_gb_s))


def words_of(case: Case, *, predictor: Path, experts_format: str) -> dict[str, Any]:
    """What the configuration of `case` says beside the residency."""
    words: dict[str, Any] = {"model": {"experts": experts_format}}
    if case.policy == "seqmoe":
        prediction = {"path": str(predictor), "horizon": "step"}
        return words | {"preset": "seqmoe", "prediction": prediction}
    return words | {"eviction": {"policy": case.policy}}


def rows_of(
    done: Mapping[Case, Measured], bounds: Mapping[float, Bound], *, experts_format: str, note: str
) -> list[Row]:
    """Shares of full load by residency, without what was not measured."""
    full = next((measured for case, measured in done.items() if case.residency == 1), None)
    if full is None:
        return []
    rows = []
    for residency, bound in bounds.items():
        name = f"{100 * residency:.0f}_{experts_format}"
        found = {case.policy: measured for case, measured in done.items() if case.residency == residency}
        share = min(1.0, 1 / (full.tok_s * bound.seconds)) if bound.seconds else 1.0
        rows.append(
            Row(
                id=f"predict.bound_share_{name}",
                value=share,
                unit="share",
                note=f"Belady's optimum: hits {100 * bound.hit_rate:.1f} %, the rest over the link alone",
            )
        )
        if "seqmoe" in found:
            rows.append(_share_row(name, residency, found, full, experts_format, note))
    return rows


def _share_row(
    name: str, residency: float, found: Mapping[str, Measured], full: Measured, fmt: str, note: str
) -> Row:
    ours, lru = found["seqmoe"], found.get("lru")
    beside = f"LRU {lru.tok_s / full.tok_s:.3f}, hits {100 * lru.hit_rate:.1f} %" if lru else None
    moved = ours.bytes_token / 1e6
    return Row(
        id=f"predict.full_load_share_{name}",
        value=ours.tok_s / full.tok_s,
        unit="share",
        target=TARGET.get((fmt, residency)),
        reference=beside,
        note=(
            f"{ours.tok_s:.1f} of {full.tok_s:.1f} tok/s, hits {100 * ours.hit_rate:.1f} %, {moved:.0f} MB a "
            f"token; {note}"
        ),
    )


def cases_of(residencies: Iterable[float], mode: str) -> list[Case]:
    """Full load first: all others are shares of it."""
    offloaded = [Case(policy, share, mode) for share in residencies for policy in ("seqmoe", "lru")]
    return [FULL._replace(mode=mode), *offloaded]


def measure_all(options: argparse.Namespace, folder: Path) -> tuple[list[Row], int]:
    """Rows of the cases that succeeded, and how many did not."""
    geometry = geometry_of(options)
    checkpoint = ensure_checkpoint(options.checkpoint, geometry)
    trace, info = read_compact(options.trace)
    trace = cut(trace, geometry.layers)
    plan = Plan(checkpoint, options.device, options.tokens, (), options.runs)
    predictor = fitted(options.predictor, RouterFingerprint.of_model(read_geometry(checkpoint)), folder)
    mode = "graph" if options.device == "cuda" else "eager"
    done, num_failed, record_bytes = dict[Case, Measured](), 0, 0

    def measure(case: Case) -> Measured:
        words = words_of(case, predictor=predictor, experts_format=options.experts_format)
        loaded = opened(plan, case, words, replay=lambda parts: replay_routers(parts.model, trace))
        nonlocal record_bytes
        record_bytes = loaded.record_bytes
        return measure_loaded(plan, case, loaded)

    for case in cases_of(options.residencies, mode):
        measured = attempt(str(case), partial(measure, case))
        if measured is None:
            num_failed += 1
        else:
            done[case] = measured
            print(measured, flush=True)
        free_device()
    link = options.link or measure_link().pinned
    assert link is not None, "a rate of the link"
    bounds = {
        share: bound_of(trace, share, record_bytes=record_bytes, link_gb_s=link)
        for share in options.residencies
        if record_bytes
    }
    facts = RoutingFacts.of(trace)
    note = (
        f"{geometry.layers} layers of {geometry.experts} experts, random weights; routing of {info.model}, "
        f"{info.decoding}, load entropy {facts.load_entropy:.3f}; link {link:.1f} GB/s"
    )
    return rows_of(done, bounds, experts_format=options.experts_format, note=note), num_failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write. Returns how many cases failed."""
    options = parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        rows, num_failed = measure_all(options, Path(folder))
    if rows:
        ResultFile.write(f"predicted_decode_{options.experts_format}", rows, folder=options.results)
    return num_failed


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of this bench."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, help="what bench.traces.compact kept")
    parser.add_argument("predictor", type=Path, help="what bench.traces.learn taught")
    parser.add_argument("--checkpoint", type=Path, default=Path(tempfile.gettempdir()) / "bench-checkpoint")
    parser.add_argument("--experts-format", choices=("checkpoint", "fp8", "int8", "int4"), default="fp8")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--residencies", type=float, nargs="+", default=list(RESIDENCIES))
    parser.add_argument("--tokens", type=int, default=128, help="decoded in each repetition")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--link", type=float, help="GB/s; measured unless given")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    add_geometry(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
