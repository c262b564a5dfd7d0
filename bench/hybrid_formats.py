"""Misses loaded, computed on the CPU, or split between both, for each format of the experts.

    python -m bench.hybrid_formats --device cuda --checkpoint FOLDER --routing routing.safetensors
    python -m bench.hybrid_formats                                 the bundled model on this CPU, its own text

All engines are of one process: a format's experts are read (and quantised) once and handed from one engine to
the next, and the three handlers follow each other within seconds. Each decodes until the captured step has
found its share of misses for the CPU, then some stretches of text that are the same for all; its speed is the
median of these. Where loading and computing cost about the same, splitting is worth most: the case of the
smallest residency where that is so has a row of its own, with what both cost. `--cpu-threads` makes the CPU
as slow as the link where it is not.

On a GPU machine, of 4 layers, a case takes some 8 s, and 40 s where it compiles; after `--seconds` no further
case is begun. The rows are of what was measured, and are written after each case, so a run that is killed
keeps them. Cases that fail are said, and the exit status is their number.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

from bench.decode_case import (
    SHORT_PROMPT,
    Case,
    Loaded,
    Plan,
    make_prompt,
    model_sizes,
    opened,
    replay_experts,
    settle,
)
from bench.harness import RESULTS, ResultFile, Row, attempt
from bench.hybrid_misses import HANDLERS, mode_of
from bench.models.random_checkpoint import ensure_checkpoint
from bench.models.random_geometry import RandomGeometry
from bench.routing import Experts, RecordedRouting, RoutingFacts
from bench.routing_replay import Replay
from hetero_gpu import CacheStats
from hetero_runtime.assembly import Parts
from hetero_runtime.bundled import model_path
from hetero_runtime.experts.base import ExpertStore
from hetero_runtime.in_place import InPlaceStats
from hetero_runtime.orchestrator.device import DeviceOrchestrator
from hetero_scheduler.trials import Trials

DEVICE = "cpu"

FORMATS = ("checkpoint", "int8", "int4", "fp8")
RESIDENCIES = (0.25, 0.45)
LEAST_WARM_UPS, MOST_WARM_UPS = 2, 12
"""Decodes that are not timed: until the trials of shares have ended."""
EVEN = 0.75
"""Of the faster one's speed: from here on load and cpu cost about the same."""


class Speeds(NamedTuple):
    """Tokens a second of each handler, in one case."""

    format: str
    residency: float
    load: float
    cpu: float
    hybrid: float
    told: str = ""
    """What each of them did."""

    @property
    def over_best(self) -> float:
        """The split's speed over that of the better one."""
        return self.hybrid / max(self.load, self.cpu)

    @property
    def evenness(self) -> float:
        """The slower one's speed over the faster one's."""
        return min(self.load, self.cpu) / max(self.load, self.cpu)

    def noted(self, note: str) -> str:
        """`note`, and what each of them did."""
        return f"{note}; {self.told}" if self.told else note

    def __str__(self) -> str:
        return (
            f"{self.format} at {100 * self.residency:.0f} %: load {self.load:.3g}, cpu {self.cpu:.3g}, "
            f"hybrid {self.hybrid:.3g} tok/s"
        )


class Engines:
    """Engines of one checkpoint, one after another, with one bank of experts for each format."""

    def __init__(self, plan: Plan, *, mode: str, cpu_threads: int | None, routing: Experts | None) -> None:
        self._plan, self._mode, self._routing = plan, mode, routing
        self._cpu = {} if cpu_threads is None else {"cpu": {"threads": cpu_threads}}
        self._store: ExpertStore | None = None
        self._format = ""

    def speeds(self, name: str, residency: float) -> Speeds:
        """All handlers, one after another."""
        if name != self._format:
            self.close()
            self._format = name
        engines = [self._measure(residency, handler) for handler in HANDLERS]
        told = "; ".join(
            f"{handler}: {engine.told}" for handler, engine in zip(HANDLERS, engines, strict=True)
        )
        return Speeds(name, residency, *(engine.tok_s for engine in engines), told)

    def close(self) -> None:
        """Give the bank back."""
        if self._store is not None:
            self._store.close()
            self._store = None

    def _measure(self, residency: float, handler: str) -> _Engine:
        """One engine, once it has settled."""
        words = {"model": {"experts": self._format}, "misses": {"handler": handler}}
        words |= {} if handler == "load" else self._cpu
        replays: list[Replay] = []

        def replay(parts: Parts) -> None:
            assert self._routing is not None, "nothing to replay"
            replays.append(replay_experts(parts, routing=self._routing))

        store, self._store = self._store, None  # closed where the next engine fails to load
        case = Case("lru", residency, self._mode, handler)
        replayed = None if self._routing is None else replay
        loaded = opened(self._plan, case, words, replay=replayed, store=store)
        try:
            return self._timed(loaded, replays)
        finally:
            self._store = loaded.engine.release()

    def _timed(self, loaded: Loaded, replays: Sequence[Replay]) -> _Engine:
        engine, trials = loaded.engine, _trials(loaded.parts)
        prompt = make_prompt(SHORT_PROMPT)
        decode = partial(engine.generate, prompt, max_tokens=self._plan.tokens + 1, ignore_eos=True)
        for _ in range(LEAST_WARM_UPS):
            decode()
        settle(loaded.parts.orchestrator, lambda _: decode(), MOST_WARM_UPS - LEAST_WARM_UPS)
        for each in replays:
            each.seek(0)
        decode()  # a step that asks nobody any more is captured in front of it
        before = engine.stats().decode
        decodes = [decode() for _ in range(self._plan.runs)]
        after = engine.stats().decode
        told = _told(after.cache - before.cache, after.in_place - before.in_place, trials)
        return _Engine(statistics.median(decode.timings.tok_s for decode in decodes), told)


class _Engine(NamedTuple):
    """One engine's median speed, and what it did meanwhile."""

    tok_s: float
    told: str


def _trials(parts: Parts) -> Trials[float] | None:
    """What the captured step tries; None where it tries nothing."""
    return parts.orchestrator.trials if isinstance(parts.orchestrator, DeviceOrchestrator) else None


def _told(cache: CacheStats, in_place: InPlaceStats, trials: Trials[float] | None) -> str:
    told = f"hits {100 * cache.hit_rate:.0f} %"
    if in_place.experts:
        each_us = 1e6 * in_place.seconds / in_place.experts
        told += f", {100 * in_place.experts / cache.required:.0f} % on the CPU in {each_us:.0f} us each"
    if trials is None or not trials.step_s:
        return told
    tried = ", ".join(f"{share}: {1e3 * seconds:.2f}" for share, seconds in sorted(trials.step_s.items()))
    verdict = "given up" if trials.is_lost else f"share {trials.choice}"
    return f"{told}, {verdict} (ms a step by share: {tried})"


def measure(
    engines: Engines, options: argparse.Namespace, save: Callable[[Sequence[Speeds]], object]
) -> tuple[list[Speeds], int]:
    """What was measured within the time, and how many cases failed. `save` gets all so far after each."""
    end, found, num_failed = time.monotonic() + options.seconds, list[Speeds](), 0
    for name, residency in product(options.formats, options.residencies):
        if time.monotonic() > end:
            print(
                f"{name} at {100 * residency:.0f} %: not begun, {options.seconds:.0f} s are over", flush=True
            )
            continue
        began = time.monotonic()
        speeds = attempt(f"{name} at {residency}", partial(engines.speeds, name, residency))
        if speeds is None:
            num_failed += 1
        else:
            found.append(speeds)
            print(f"{speeds}; {time.monotonic() - began:.0f} s\n    {speeds.told}", flush=True)
            save(found)
    return found, num_failed


def rows_of(found: Sequence[Speeds], note: str) -> list[Row]:
    """The rows of all cases, at least one."""
    worst, fewest = min(found, key=lambda case: case.over_best), min(case.residency for case in found)
    evenest = max((case for case in found if case.residency == fewest), key=lambda case: case.evenness)
    rows = [
        Row(
            id="cpu.hybrid_over_best",
            value=worst.over_best,
            unit="ratio",
            target=">=0.98",
            reference=f"the least of {len(found)} cases: {worst}",
            note=worst.noted(note),
        )
    ]
    if evenest.evenness >= EVEN:
        rows.append(
            Row(
                id="cpu.hybrid_over_best_balanced",
                value=evenest.over_best,
                unit="ratio",
                target=">=1.3",
                reference=f"at {100 * fewest:.0f} % both are nearest here, {evenest.evenness:.2f}: {evenest}",
                note=evenest.noted(note),
            )
        )
    return [*rows, *(_speed_row(case, note) for case in found)]


def _speed_row(case: Speeds, note: str) -> Row:
    name = "bf16" if case.format == "checkpoint" else case.format
    return Row(
        id=f"cpu.hybrid_tok_s_{name}_{100 * case.residency:.0f}",
        value=case.hybrid,
        unit="tok/s",
        reference=f"load {case.load:.3g}, cpu {case.cpu:.3g} tok/s, same run",
        note=case.noted(note),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write `hybrid_formats.json`, return how many cases failed."""
    options = parse(arguments)
    checkpoint = options.checkpoint
    if options.layers is not None:
        ensure_checkpoint(checkpoint, RandomGeometry(layers=options.layers))
    mode = mode_of(options)
    routing, text = None, "greedy text of the model's own routers"
    if options.routing is not None:
        sizes = model_sizes(checkpoint)
        routing = RecordedRouting.load(options.routing).laid_over(**sizes)
        text = f"routing replayed from recorded held-out text; {RoutingFacts.of(routing, sizes['experts'])}"
    plan = Plan(checkpoint, options.device, options.tokens, (), options.runs)
    engines = Engines(plan, mode=mode, cpu_threads=options.cpu_threads, routing=routing)
    note = f"{options.runs} decodes of {options.tokens} tokens, LRU, {mode}, device {options.device}; {text}"

    def save(found: Sequence[Speeds]) -> None:
        ResultFile.of("hybrid_formats", rows_of(found, note)).save(options.results)

    try:
        found, num_failed = measure(engines, options, save)
    finally:
        engines.close()
    if found:
        ResultFile.write("hybrid_formats", rows_of(found, note), folder=options.results)
    return num_failed


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--checkpoint", type=Path, default=model_path(), help="default: the bundled model")
    parser.add_argument("--layers", type=int, help="write a random checkpoint of so many layers there first")
    parser.add_argument("--routing", type=Path, help="what bench.routing_replay recorded; default: its own")
    parser.add_argument("--mode", choices=("eager", "graph"), help="default: graph on cuda, else eager")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--residencies", type=float, nargs="+", default=list(RESIDENCIES))
    parser.add_argument("--tokens", type=int, default=96, help="decoded in each repetition")
    parser.add_argument("--runs", type=int, default=3, help="repetitions of each engine")
    parser.add_argument("--cpu-threads", type=int, help="of the engine and its workers; default: every core")
    parser.add_argument("--seconds", type=float, default=100, help="after so many no further case is begun")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
