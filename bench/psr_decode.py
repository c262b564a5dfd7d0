"""Prefetch-steered routing in the captured step, beside exact LRU and Cache-Prior (PSR §6.2, Tables 2 and 6).

    python -m bench.psr_decode --model olmoe --checkpoint FOLDER
    python -m bench.psr_decode --model moonlight --checkpoint FOLDER

The checkpoint has OLMoE-1B-7B's geometry or Moonlight-16B-A3B's, and random weights: its backbone (0.9 and
2.6 GB) is written unless it is there, its experts (12.9 GB and, with `--layers 13`, 14.4) are made once in
the memory that all engines serve from (`models/random_bank.py`). What its routers and its head say is a
recording of real text (`bench/psr_recording.py`). Each engine is measured at the machine's own link, then at
one of 25 GB/s, the paper's (`bench/slow_link.py`), with its step captured anew and nothing loaded again.

On a machine with an H200 a run is supposed to take 20 s until the first engine is ready (the trace of the
bundled model 10 more, where none is given), 4 to 7 s for each engine after it, 1 to 3 for its steps and, at
the other link, 3 to 5 for both. Moonlight with `--layers 13` the same. `--residencies 0.5`, `--runs 1`,
`--tokens 48`, `--policies cache_prior psr` and `--own-link` shorten it; `--seconds 80` begins no engine that
is not supposed to be done by then. `--policies cache_prior psr psr:0.3:1:4` measures PSR with other numbers
(lambda, insertions, window) beside it. Rows of both models stand in one result file, if it is the same
commit's.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bench.decode_case import Case, Loaded, Plan, capture_anew, config_of, opened
from bench.eager_decode import free_device
from bench.harness import RESULTS, ResultFile, Row, attempt
from bench.models.random_bank import random_store
from bench.models.random_checkpoint import ensure_checkpoint
from bench.models.random_geometry import MoonlightGeometry, OlmoeGeometry, RandomGeometry
from bench.psr_case import POLICIES, Steps, Stretch, measure_steps, numbers_of, recite_in, words_of
from bench.psr_recording import Recording, divided, recorded
from bench.psr_rows import Key, Link, rows_of
from bench.slow_link import LinkRates, SlowLink, slow_gather
from bench.traces.bundled import TEXT
from bench.traces.laid_over import sigmoid_scores
from hetero_gpu.tables import MappedBank
from hetero_runtime.calibration.file import write_calibration
from hetero_runtime.config import ResolvedConfig
from hetero_runtime.evaluation.frontier.replay import calibrate
from hetero_runtime.experts.base import ExpertStore
from hetero_runtime.experts.store import BankStore
from hetero_runtime.plan import read_geometry
from hetero_runtime.planned import plan_for
from hetero_runtime.prediction import RouterFingerprint

RESIDENCIES = (0.5, 0.25)
SLOW_GB_S = 25.0


class Model(NamedTuple):
    """A geometry, how its routers score, and how much of a text its time allows."""

    geometry: RandomGeometry
    is_sigmoid: bool
    tokens: int
    runs: int


MODELS = {
    "olmoe": Model(OlmoeGeometry(), is_sigmoid=False, tokens=96, runs=3),
    "moonlight": Model(MoonlightGeometry(), is_sigmoid=True, tokens=64, runs=2),
}


@dataclass
class Bench:
    """What one run of the bench works with and finds."""

    plan: Plan
    recording: Recording
    calibration: Path
    stretch: Stretch
    is_slowed: bool
    began_s: float
    done: dict[Key, Steps] = field(default_factory=dict)
    rates: LinkRates | None = None
    store: ExpertStore | None = None
    num_failed: int = 0
    longest_s: float = 0.0
    """Of the engines that were measured."""

    def measure(self, policy: str, residency: float) -> bool:
        """One engine, at each link. Leaves its experts to the next one. Returns that it is done."""
        slow = SlowLink()
        mode = "graph" if self.plan.device == "cuda" else "eager"
        case = Case(policy, residency, mode)
        words = words_of(policy, residency, self.calibration)
        config = plan_for(config_of(self.plan, case, words)).config  # what cannot be costs no experts
        store, self.store = self.store or self._made(config), None
        began_s = time.perf_counter()
        with slow.wired():
            loaded = opened(self.plan, case, words, store=store)
        self.say(f"{policy} {case.percent}: ready after {loaded.load_s:.1f} s")
        try:
            self._measure_links(loaded, slow, policy, residency)
        finally:
            # not the engine's close, which would free the experts
            self.store = loaded.parts.release()
            self.longest_s = max(self.longest_s, time.perf_counter() - began_s)
        return True

    def has_time(self, seconds: float | None) -> bool:
        """Whether one more engine, as long as the longest so far, is done `seconds` after all began."""
        return seconds is None or time.perf_counter() - self.began_s + self.longest_s <= seconds

    def rows(self, model: str) -> list[Row]:
        """Of what was measured so far. `model`: the name of the geometry."""
        trace = self.recording.trace
        note = (
            f"{trace.num_layers} layers of {trace.num_experts} experts, top-{trace.top_k}, random weights, "
            f"{self.plan.device}; {self.recording.source}, load entropy {trace.load_entropy():.3f}; "
            f"{self.plan.runs} texts of {self.stretch.tokens} steps"
        )
        return rows_of(self.done, model=model, rates=self.rates, note=note)

    def close(self) -> None:
        """Free the experts."""
        if self.store is not None:
            self.store.close()
            self.store = None

    def _measure_links(self, loaded: Loaded, slow: SlowLink, policy: str, residency: float) -> None:
        parts = loaded.parts
        recital = recite_in(parts, self.recording.trace)
        capture_anew(parts)
        measured = partial(
            measure_steps, loaded.engine, parts, recital, texts=self.recording.texts, stretch=self.stretch
        )
        self._note(Key(policy, residency, Link.OWN), measured)
        if not self.is_slowed:
            return
        assert isinstance(parts.store, BankStore), "a captured step reads experts from host memory"
        record_bytes = parts.store.stored_bytes
        extra = self._rates(parts.store, loaded).slowed_to(SLOW_GB_S, record_bytes)
        with slow.slowed(extra, record_bytes, parts.device):
            capture_anew(parts)  # behind the last text, for whose row there is room
            self._note(Key(policy, residency, Link.SLOW), measured)

    def _rates(self, store: BankStore, loaded: Loaded) -> LinkRates:
        """Measured once: all engines have the same experts in the same memory."""
        if self.rates is None:
            bank = MappedBank.of(store.records, store.stored_bytes, store.packing)
            of = partial(
                LinkRates.of, store.records, bank, (store.num_layers, store.num_experts), loaded.parts.device
            )
            self.rates = of()
            extra = self.rates.slowed_to(SLOW_GB_S, store.stored_bytes)
            self.say(f"the link: {self.rates}; {extra}; then {of(load=slow_gather(extra.load)).load:.1f}")
        return self.rates

    def _made(self, config: ResolvedConfig) -> ExpertStore:
        store = random_store(config)
        self.say(f"{store.bank_bytes / 1e9:.1f} GB of experts made, {store.stored_bytes / 1e6:.2f} MB each")
        return store

    def _note(self, key: Key, measured: Callable[[], Steps]) -> None:
        self.done[key] = measured()
        self.say(f"{key}: {self.done[key]}")

    def say(self, what: str) -> None:
        """To whoever looks on, with the seconds so far."""
        print(f"[{time.perf_counter() - self.began_s:5.1f} s] {what}", flush=True)


def prepare(options: argparse.Namespace, model: Model, folder: Path, began_s: float) -> Bench:
    """Checkpoint, recording and calibration; the latter in `folder`."""
    geometry = model.geometry if options.layers is None else replace(model.geometry, layers=options.layers)
    checkpoint = ensure_checkpoint(options.checkpoint, geometry, has_experts=False)
    stretch, num_runs = Stretch(options.settle, options.tokens or model.tokens), options.runs or model.runs
    heard = recorded(options.trace, options.corpus, stretch.window, most=options.documents)
    recording, lesson = divided(heard.fitted(geometry, is_sigmoid=model.is_sigmoid), num_runs=num_runs)
    calibration = folder / "laid_over.calibration.safetensors"
    write_calibration(
        calibration,
        calibrate(sigmoid_scores(lesson) if model.is_sigmoid else lesson),
        fingerprint=RouterFingerprint.of_model(read_geometry(checkpoint)),
        notes={"text": heard.source},
    )
    bench = Bench(
        Plan(checkpoint, options.device, stretch.window, (), num_runs),
        recording,
        calibration,
        stretch,
        is_slowed=options.device == "cuda" and not options.own_link,
        began_s=began_s,
    )
    bench.say(f"{heard.source}; {lesson.num_tokens} tokens calibrate, {num_runs} texts are decoded")
    return bench


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; the result file has the rows of every engine once it is done. Returns how many failed."""
    options, began_s = parse(arguments), time.perf_counter()
    result: ResultFile | None = None
    with tempfile.TemporaryDirectory() as folder, ExitStack() as undo:
        bench = prepare(options, MODELS[options.model], Path(folder), began_s)
        undo.callback(bench.close)
        for residency, policy in itertools.product(options.residencies, options.policies):
            what = f"{policy} at {residency:g}"
            if not bench.has_time(options.seconds):
                bench.say(f"{what}: no time left")
                continue
            if not attempt(what, partial(bench.measure, policy, residency)):
                bench.num_failed += 1
            free_device()
            if rows := bench.rows(options.model):
                result = ResultFile.of("psr_decode", rows).beside(options.results)
                result.save(options.results)
    if result is not None:
        result.tell()
    return bench.num_failed


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of this bench."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=tuple(MODELS), default="olmoe")
    parser.add_argument("--checkpoint", type=Path, required=True, help="written unless it is there")
    parser.add_argument("--trace", type=Path, help="a trace file with early routers; default: made now")
    parser.add_argument("--corpus", type=Path, default=TEXT, help="its held-out text is what is recorded")
    parser.add_argument("--documents", type=int, help="of it, at most")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--residencies", type=float, nargs="+", default=list(RESIDENCIES))
    parser.add_argument("--layers", type=int, help="with experts; default: all of the model's")
    parser.add_argument("--settle", type=int, default=16, help="tokens before those that are timed")
    parser.add_argument("--tokens", type=int, help="timed in each run; default: 96, Moonlight 64")
    parser.add_argument("--runs", type=int, help="texts; default: 3, Moonlight 2")
    parser.add_argument(
        "--policies",
        nargs="+",
        default=list(POLICIES),
        help="lru, cache_prior[:LAMBDA], paper, psr[:LAMBDA[:INSERTIONS[:WINDOW]]]",
    )
    parser.add_argument("--seconds", type=float, help="begin no engine that ends later; default: all")
    parser.add_argument("--own-link", action="store_true", help="leave out the slower link")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    options = parser.parse_args(arguments)
    for policy in options.policies:
        try:
            numbers_of(policy)
        except ValueError as error:
            parser.error(str(error))
    return options


if __name__ == "__main__":
    sys.exit(main())
