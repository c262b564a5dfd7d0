"""Misses loaded, computed on the CPU, or split between both: tokens a second of each, and its memory.

    python -m bench.hybrid_misses                                            the bundled model on this CPU
    python -m bench.hybrid_misses --device cuda --checkpoint FOLDER --routing routing.safetensors
    python -m bench.hybrid_misses --handlers load hybrid --residencies 0.25 --rounds 1 --runs 1   memory alone

Each engine runs in a process of its own, one after another and round by round, so that peaks of memory are
its own and what else the machine does falls on all of them. On device cpu the link is a copy within memory,
and a hit is computed by the same cores: it is measured as it is. Without a recorded routing the text is
greedy, which repeats itself and flatters every cache, all alike.

On a GPU machine, of 4 layers, a process takes some 40 s, nearly all of it to import, to read the checkpoint
and to compile, which is said of each; there are as many as handlers times residencies times rounds, twelve
without options and two for memory alone. Rows are of what was measured, and are written after each process,
so a run that is killed keeps them; processes that fail are said, and the exit status is their number.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

from bench.decode_case import Case, Plan, measure_case, model_sizes
from bench.harness import RESULTS, ResultFile, Row, attempt
from bench.machine import ROOT
from bench.routing import Experts, RecordedRouting, RoutingFacts
from hetero_runtime.bundled import model_path
from hetero_runtime.own_memory import peak_rss_bytes

DEVICE = "cpu"

HANDLERS = ("load", "cpu", "hybrid")


class Engine(NamedTuple):
    """One engine in one process: its decodes' speeds, the most memory that the process had resident, and what
    loading took, and capturing a step as a part of that."""

    handler: str
    residency: float
    all_tok_s: list[float]
    peak_rss_bytes: int
    load_s: float = 0.0
    start_s: float | None = None


def measure_here(options: argparse.Namespace) -> Engine:
    """Load and measure the one engine that `options` name, in this process."""
    plan = Plan(options.checkpoint, options.device, options.tokens, (), options.runs)
    case = Case("lru", options.residency, mode_of(options), options.handler)
    measured = measure_case(plan, case, _routing(options))
    return Engine(
        options.handler,
        options.residency,
        measured.all_tok_s,
        peak_rss_bytes(),
        measured.load_s,
        measured.start_s,
    )


def measure_apart(options: argparse.Namespace, handler: str, residency: float) -> Engine:
    """The same in a process of its own."""
    words = [*("--handler", handler, "--residency", str(residency)), *_common_words(options)]
    command = [sys.executable, "-m", "bench.hybrid_misses", *words]
    began = time.perf_counter()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    engine = Engine(**json.loads(done.stdout.splitlines()[-1]))
    captured = "" if engine.start_s is None else f", {engine.start_s:.1f} s of them to capture"
    print(
        f"{handler} at {100 * residency:.0f} %: {statistics.median(engine.all_tok_s):.3g} tok/s, "
        f"{engine.peak_rss_bytes / 1e6:.0f} MB; {time.perf_counter() - began:.0f} s, {engine.load_s:.1f} s "
        f"of them to load{captured}",
        flush=True,
    )
    return engine


def rows_of(engines: Sequence[Engine], note: str) -> list[Row]:
    """Of what was measured: of speed where all handlers were, of memory where load and hybrid were."""
    rows, shares = [], []
    for residency in sorted({engine.residency for engine in engines}):
        if {engine.handler for engine in engines if engine.residency == residency} != set(HANDLERS):
            continue
        speed = {name: _tok_s(engines, name, residency) for name in HANDLERS}
        best = max(speed["load"], speed["cpu"])
        shares.append(speed["hybrid"] / best)
        rows.append(
            Row(
                id=f"cpu.hybrid_tok_s_{100 * residency:.0f}",
                value=speed["hybrid"],
                unit="tok/s",
                reference=f"load {speed['load']:.3g}, cpu {speed['cpu']:.3g} tok/s, same run",
                note=note,
            )
        )
    if shares:
        over_best = Row(
            id="cpu.hybrid_over_best",
            value=min(shares),
            unit="ratio",
            target=">=0.98",
            reference="the better of load and cpu, at the residency where it is least",
            note=note,
        )
        rows.insert(0, over_best)
    if {"load", "hybrid"} <= {engine.handler for engine in engines}:
        rows.append(_memory_row(engines))
    return rows


def _memory_row(engines: Sequence[Engine]) -> Row:
    return Row(
        id="cpu.rss_extra_mb",
        value=(_peak(engines, "hybrid") - _peak(engines, "load")) / 1e6,
        unit="MB",
        target="<=200",
        reference=f"load: {_peak(engines, 'load') / 1e6:.0f} MB resident at the peak",
        note="peaks of whole processes: compiler, kernels, workspace",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all, write `hybrid_misses.json`, return how many processes failed; with --handler measure one
    engine and print it as JSON."""
    options = parse(arguments)
    if options.handler is not None:
        print(json.dumps(measure_here(options)._asdict()))
        return 0
    engines, num_failed, note = list[Engine](), 0, _note(options)
    for _, residency, handler in product(range(options.rounds), options.residencies, options.handlers):
        engine = attempt(
            f"{handler} at {100 * residency:.0f} %", partial(measure_apart, options, handler, residency)
        )
        if engine is None:
            num_failed += 1
            continue
        engines.append(engine)
        if rows := rows_of(engines, note):
            ResultFile.of("hybrid_misses", rows).save(options.results)
    if rows := rows_of(engines, note):
        ResultFile.write("hybrid_misses", rows, folder=options.results)
    return num_failed


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--checkpoint", type=Path, default=model_path(), help="default: the bundled model")
    parser.add_argument("--routing", type=Path, help="what bench.routing_replay recorded; default: its own")
    parser.add_argument("--mode", choices=("eager", "graph"), help="default: graph on cuda, else eager")
    parser.add_argument("--tokens", type=int, default=128, help="decoded in each repetition")
    parser.add_argument("--runs", type=int, default=3, help="repetitions in each process")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each kind")
    parser.add_argument("--residencies", type=float, nargs="+", default=[0.25, 0.45])
    parser.add_argument("--handlers", nargs="+", choices=HANDLERS, default=list(HANDLERS))
    parser.add_argument("--handler", choices=HANDLERS, help="measure one engine, in this process")
    parser.add_argument("--residency", type=float, default=0.25, help="of that one")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    return parser.parse_args(arguments)


def _common_words(options: argparse.Namespace) -> list[str]:
    words = ["--device", options.device, "--checkpoint", str(options.checkpoint), "--mode", mode_of(options)]
    words += ["--tokens", str(options.tokens), "--runs", str(options.runs)]
    return words if options.routing is None else [*words, "--routing", str(options.routing)]


def mode_of(options: argparse.Namespace) -> str:
    """Of execution, as asked for or as the device suggests."""
    return options.mode or ("graph" if options.device == "cuda" else "eager")


def _routing(options: argparse.Namespace) -> Experts | None:
    if options.routing is None:
        return None
    return RecordedRouting.load(options.routing).laid_over(**model_sizes(options.checkpoint))


def _note(options: argparse.Namespace) -> str:
    note = (
        f"{options.rounds} x {options.runs} decodes of {options.tokens} tokens, LRU, {mode_of(options)}, "
        f"device {options.device}"
    )
    routing = _routing(options)
    if routing is None:
        return f"{note}; greedy text of the model's own routers"
    facts = RoutingFacts.of(routing, model_sizes(options.checkpoint)["experts"])
    return f"{note}; routing replayed from recorded held-out text; {facts}"


def _tok_s(engines: Sequence[Engine], handler: str, residency: float) -> float:
    """Median of all decodes of that kind."""
    of_kind = [e for e in engines if e.handler == handler and e.residency == residency]
    return statistics.median(speed for engine in of_kind for speed in engine.all_tok_s)


def _peak(engines: Sequence[Engine], handler: str) -> int:
    return max(engine.peak_rss_bytes for engine in engines if engine.handler == handler)


if __name__ == "__main__":
    sys.exit(main())
