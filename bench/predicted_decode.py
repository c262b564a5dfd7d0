"""Decode with forecasts as a share of full load: a trained model's routing over Qwen3-30B-A3B's geometry.

    python -m bench.predicted_decode KEPT.trace.xz PREDICTOR --layers 24 [--experts-format bf16]

The trace and the predictor are those of a narrow model (`bench/traces`); weights are random, so bytes and
kernels are the large model's, and what routers and head say is the trace's. A model of half the trace's
layers is served by the predictor's first group. LRU stands beside `preset: seqmoe` at every residency, and
the bound: what the link alone allows for the bytes that Belady's optimum would still move. Replaying adds a
small kernel or two a layer, to full load as to the others.

Experts are made in host memory once and handed from engine to engine; the checkpoint on the disk has holes
in their place (`models/random_bank.py`). Supposed for a machine with an H200 and 16 cores, 24 layers, and not
measured: 20 s until the experts are there, quantised or packed, and kernels are compiled; then 9 s an engine,
9 of them; 15 s for the simulator: 120 s, and 80 s with `--residencies 0.25 0.45`. Each further `--horizon` is
an engine more at each residency; where misses are split, one takes 27 s, until all shares were tried. No
engine is begun after `--seconds`.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

from bench.decode_case import Plan
from bench.eager_decode import free_device
from bench.harness import RESULTS, ResultFile, attempt
from bench.models.random_checkpoint import add_geometry, ensure_checkpoint, geometry_of
from bench.predicted_engines import Bench
from bench.predicted_rows import FULL, Contender
from bench.predicted_texts import Texts
from bench.traces.compact import read_compact
from hetero_gpu.link import measure_link
from hetero_runtime.config.tree import MissHandler
from hetero_runtime.plan.geometry import read_geometry
from hetero_runtime.prediction import RouterFingerprint, read_predictor, write_predictor
from hetero_scheduler.predict.refinement import Refinement
from hetero_scheduler.predict.routing import layer_groups
from hetero_scheduler.trace import Trace

RESIDENCIES = (0.45, 0.25, 0.35, 0.15)


def cut(trace: Trace, layers: int) -> Trace:
    """The first `layers` of `trace`."""
    early = None if trace.early is None else trace.early[:, :layers]
    return replace(trace, logits=trace.logits[:, :layers], topk=trace.topk[:, :layers], early=early)


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
    refinement = None if stored.refinement is None else _refinement(stored.refinement, model.num_layers)
    write_predictor(path, models, fingerprint=model, notes=stored.notes, refinement=refinement)
    return path


def _refinement(whole: Refinement, layers: int) -> Refinement:
    """What `whole` has learned of the first `layers`."""
    pool = None if whole.pool is None else whole.pool[:layers]
    return Refinement(
        whole.scale[:layers], whole.embedding, whole.head[:layers], whole.bias[:layers], pool=pool
    )


def contenders_of(
    residencies: Sequence[float], horizons: Sequence[str], misses: Sequence[MissHandler]
) -> Iterator[Contender]:
    """Full load first: all others are shares of it. Then one handler after another: time may end."""
    yield FULL
    for handler, residency in itertools.product(misses, residencies):
        yield from (Contender(residency, horizon, handler) for horizon in (*horizons, None))


def prepare(options: argparse.Namespace, folder: Path, began_s: float) -> Bench:
    """Checkpoint, texts and predictor, the latter in `folder`. Raises ValueError for what cannot be replayed
    and ConfigError for a horizon that was not learned, before any expert is made."""
    geometry = geometry_of(options)
    checkpoint = ensure_checkpoint(options.checkpoint, geometry, has_experts=False)
    trace, info = read_compact(options.trace)
    trace = cut(trace, geometry.layers)
    link = options.link or measure_link().pinned
    if link is None:
        raise ValueError("this machine's link cannot be measured; say how fast it is with --link")
    bench = Bench(
        Plan(checkpoint, options.device, options.tokens, (), options.runs),
        fitted(options.predictor, RouterFingerprint.of_model(read_geometry(checkpoint)), folder),
        options.experts_format,
        trace,
        info,
        Texts.of(trace, tokens=options.tokens, runs=options.runs, vocab_size=geometry.vocab_size),
        link,
        began_s,
    )
    for horizon in options.horizon:
        resolved = bench.horizon(Contender(options.residencies[0], horizon))
        assert resolved is not None, "it foresees"
        bench.texts.check(resolved)
    return bench


def measure_all(bench: Bench, options: argparse.Namespace, keep: Callable[[], object]) -> None:
    """Engines, and what they are read against; `keep` is called after each. Counts what failed."""

    def part(what: str, work: Callable[[], bool]) -> None:
        bench.num_failed += attempt(what, work) is None
        free_device()
        keep()

    for contender in contenders_of(options.residencies, options.horizon, options.misses):
        if time.perf_counter() - bench.began_s > options.seconds:
            bench.say(f"not begun: {contender}")
            bench.num_failed += 1
            continue
        part(str(contender), partial(bench.measure, contender))
        if contender == FULL and contender in bench.done:
            for residency in options.residencies:
                part(f"bound at {residency:g}", partial(bench.bound, residency))
    bench.close()
    if FULL in bench.done:  # its time is the simulator's
        simulate_all(bench, part)


def simulate_all(bench: Bench, part: Callable[[str, Callable[[], bool]], None]) -> None:
    """The simulator beside engines of two residencies; forecasts are made once for both."""
    found = [each for each, outcome in bench.done.items() if outcome.counted is not None]
    for horizon in dict.fromkeys(bench.done[each].horizon for each in found):
        foreseen = None
        if horizon is not None:
            foreseen = attempt(f"forecasts, horizon {horizon}", partial(bench.foresee, horizon))
            if foreseen is None:
                bench.num_failed += 1
                continue
        for contender in found:
            if bench.done[contender].horizon == horizon:
                part(f"simulated: {contender}", partial(bench.simulate, contender, foreseen))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; the result file has the rows of each engine once it is done. Returns how many parts failed."""
    options, began_s = parse(arguments), time.perf_counter()
    name = f"predicted_decode_{options.experts_format}"
    with tempfile.TemporaryDirectory() as folder:
        bench = prepare(options, Path(folder), began_s)

        def keep() -> None:
            if rows := bench.rows():
                ResultFile.of(name, rows).save(options.results)

        try:
            measure_all(bench, options, keep)
        finally:
            bench.close()
    if rows := bench.rows():
        ResultFile.write(name, rows, folder=options.results)
    bench.say(f"done, {bench.num_failed} parts failed")
    return bench.num_failed


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of this bench."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, help="what bench.traces.compact kept")
    parser.add_argument("predictor", type=Path, help="what bench.traces.learn taught")
    parser.add_argument("--checkpoint", type=Path, default=Path(tempfile.gettempdir()) / "bench-backbone")
    parser.add_argument("--experts-format", choices=("fp8", "bf16", "int8", "int4"), default="fp8")
    parser.add_argument(
        "--horizon",
        choices=("auto", "step", "token", "layer"),
        nargs="+",
        default=["auto"],
        help="how near forecasts are made anew, an engine each; auto: what the product chooses",
    )
    parser.add_argument(
        "--misses",
        choices=get_args(MissHandler),
        nargs="+",
        default=["load"],
        help="who handles them, an engine each, and LRU beside it; what is not loaded is not simulated",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--residencies", type=float, nargs="+", default=list(RESIDENCIES))
    parser.add_argument("--tokens", type=int, default=128, help="decoded of each text")
    parser.add_argument("--runs", type=int, default=3, help="texts, without the one that warms up")
    parser.add_argument("--link", type=float, help="GB/s; measured unless given")
    parser.add_argument("--seconds", type=float, default=150, help="after that, no engine is begun")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    add_geometry(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
