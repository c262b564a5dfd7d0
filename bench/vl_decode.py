"""VisMMOE's Table 4 on this machine: prompts with an image, step by step, loading misses or sharing them.

    python -m bench.vl_decode                    10 layers, 12 GB on the disk, about 240 s on an H200
    python -m bench.vl_decode --layers 6 --runs 2 --lessons 12 --minutes 0.15 --seconds 80

The model is the small vision-language model at the sizes of Qwen3-VL-30B-A3B (`bench/vl/widening.py`): bytes,
kernels and copies are the large one's, routing, image tokens and answers the trained one's. Pictures are nine
scenes each, 1296 image tokens, none of them trained on; a lookahead predictor is first calibrated on others.
All engines use one bank of experts, and Accelerate answers the same prompts. The whole preset runs as it does
on a GPU, in the captured step; it is held against the eager base of its mode, which is the table's, and,
without a target, against a base that is captured as well. These come first, then the peer, then what lies
between them; rows are kept as they come, and no part is begun that would end after `--seconds`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bench.harness import RESULTS, ResultFile, Row, T, attempt
from bench.lookahead_recall import passes_over
from bench.vl.drawing import NUM_CELLS
from bench.vl.geometry import PATCH
from bench.vl.mosaic import Mosaic, draw_mosaics
from bench.vl.wide_checkpoint import ensure_widened
from bench.vl.wide_geometry import add_wide_geometry, wide_geometry_of
from bench.vl_accelerate import Peer, measure_accelerate
from bench.vl_steps import (
    HANDLERS,
    KEEP_RATIO,
    SETTLING_TOKENS,
    Bank,
    Measured,
    Setup,
    Step,
    measure,
    steps_of,
)
from bench.vl_table import accelerate_rows, cost_rows, speedup_rows, step_rows
from hetero_runtime.evaluation.configuration import exactly_routed
from hetero_runtime.hf.router_hooks import router_top_k
from hetero_runtime.lookahead.gather import GatherOptions
from hetero_runtime.lookahead.train import LookaheadReport, train_from_passes
from hetero_runtime.plan import read_geometry
from hetero_runtime.prediction import RouterFingerprint
from hetero_scheduler.predict.lookahead_training import LookaheadOptions

DEVICE = "cuda"
_AROUND = 64
"""Tokens of a prompt besides its image, at most."""
_LESSON_TOKENS = 24
"""Of an answer, learnt from."""


class Prepared(NamedTuple):
    """What is measured with."""

    setup: Setup
    questions: list[Mosaic]
    """Held out; the first one warms up."""
    lessons: list[Mosaic]


class Progress:
    """Lines with the seconds since the start."""

    def __init__(self) -> None:
        self._began = self._part_began = time.monotonic()
        self._longest_s = 0.0

    def has_time(self, seconds: float | None) -> bool:
        """Whether an engine that begins now, as long as the longest so far, ends within `seconds` of all."""
        now = time.monotonic()
        if seconds is not None and now - self._began + self._longest_s > seconds:
            return False
        self._part_began = now
        return True

    def part_ends(self) -> None:
        """The engine that began last."""
        self._longest_s = max(self._longest_s, time.monotonic() - self._part_began)

    def say(self, what: object) -> None:
        print(f"[{time.monotonic() - self._began:4.0f} s] {what}", flush=True)


def prepare(options: argparse.Namespace, folder: Path) -> Prepared:
    """The checkpoint, written unless it is there, and pictures. `folder`: where the predictor is to lie."""
    geometry = wide_geometry_of(options)
    checkpoint = ensure_widened(options.checkpoint, geometry)
    draw = partial(draw_mosaics, side=options.side, wider=geometry.patch // PATCH)
    return Prepared(
        Setup(
            checkpoint=checkpoint,
            device=options.device,
            residency=options.residency,
            prefix=options.prefix,
            max_length=options.side**2 * NUM_CELLS + _AROUND + _most_answered(options),
            predictor=folder / "wide.lookahead.safetensors",
        ),
        draw(options.runs + 1, split="seeds"),
        draw(options.lessons, split="train"),
    )


def _most_answered(options: argparse.Namespace) -> int:
    """Tokens of the longest answer."""
    return max(options.tokens + 1, _LESSON_TOKENS, SETTLING_TOKENS + 1 if options.settling else 0)


def calibrate(prepared: Prepared, bank: Bank, *, minutes: float) -> LookaheadReport:
    """What `hetero-runtime calibrate lookahead` does, on conversations that were not written to a file."""
    setup = prepared.setup
    memory = {"slabs": "all", "pinned_prefix": setup.prefix}
    config = setup.loaded({"memory": memory, "vision": {"keep_ratio": KEEP_RATIO}})
    conversations = [lesson.answered for lesson in prepared.lessons]
    with bank.parts(exactly_routed(config)) as parts:
        passes = passes_over(parts, conversations, options=GatherOptions(tokens=_LESSON_TOKENS))
        top_k = router_top_k(parts.model)
    return train_from_passes(
        passes,
        setup.predictor,
        top_k=top_k,
        fingerprint=RouterFingerprint.of_model(read_geometry(setup.checkpoint)),
        options=LookaheadOptions(minutes=minutes),
    )


class Bench:
    """The parts one after another; each may fail alone."""

    def __init__(self, options: argparse.Namespace, prepared: Prepared, progress: Progress) -> None:
        self._options, self._prepared, self._progress = options, prepared, progress
        self._report: LookaheadReport | None = None
        self._done: dict[Step, Measured] = {}
        self._peer: Peer | None = None
        self.failed: list[str] = []

    def run(self) -> None:
        """Calibrate, then measure what ratios are of, the peer, and the rest; rows are written after each."""
        bank = Bank()
        ends, between = steps_of(self._options.modes)
        try:
            self._calibrate(bank)
            for step in ends:
                self._measure(bank, step)
            if self._options.accelerate_tokens:
                self._measure_accelerate()
            for step in between:
                self._measure(bank, step)
        finally:
            bank.close()

    def rows(self) -> list[Row]:
        """Of what was measured so far."""
        tokens, done = self._options.tokens, self._done
        about = self._about()
        rows = [row for step in done for row in step_rows(step, done, tokens=tokens)]
        rows += speedup_rows(done, self._peer, tokens=tokens, about=about)
        rows += cost_rows(done, about=about)
        return rows if self._peer is None else [*rows, *accelerate_rows(self._peer, done, tokens=tokens)]

    def _calibrate(self, bank: Bank) -> None:
        calibrating = partial(calibrate, self._prepared, bank, minutes=self._options.minutes)
        self._report = self._attempt("calibration", calibrating)
        if self._report is not None:
            recall = self._report.tokens[0].at
            self._progress.say(f"calibrated: recall {recall[0]:.2f}, {recall[1]:.2f}, {recall[2]:.2f}")

    def _measure(self, bank: Bank, step: Step) -> None:
        def measuring() -> Measured:
            with bank.parts(self._prepared.setup.config(step)) as parts:
                tokens, settling = self._options.tokens, self._options.settling
                return measure(parts, self._prepared.questions, tokens=tokens, settling=settling)

        measured = self._attempt_in_time(f"{step.mode} {step.name}", measuring)
        if measured is not None:
            self._done[step] = measured
            self._keep(f"{step.mode} {step.name}: {measured}")

    def _measure_accelerate(self) -> None:
        setup, options = self._prepared.setup, self._options
        measuring = partial(
            measure_accelerate,
            setup.checkpoint,
            self._prepared.questions,
            device=setup.device,
            residency=setup.residency,
            tokens=options.accelerate_tokens,
        )
        self._peer = self._attempt_in_time("accelerate", measuring)
        if self._peer is not None:
            self._keep(f"accelerate: {self._peer}")

    def _attempt_in_time(self, what: str, function: Callable[[], T]) -> T | None:
        if not self._progress.has_time(self._options.seconds):
            self._progress.say(f"{what}: not begun, it would end too late")
            return None
        found = self._attempt(what, function)
        self._progress.part_ends()
        return found

    def _attempt(self, what: str, function: Callable[[], T]) -> T | None:
        found = attempt(what, function)
        if found is None:
            self.failed.append(what)
        return found

    def _keep(self, what: str) -> None:
        self._progress.say(what)
        ResultFile.of("vl_decode", self.rows()).save(self._options.results)

    def _about(self) -> str:
        options, report = self._options, self._report
        heard = "" if report is None else f", load entropy {report.load_entropy:.3f}"
        return (
            f"{options.layers} layers of {options.experts} experts, routing of the small model{heard}; room "
            f"for {options.residency:.0%} of them; {options.side**2 * NUM_CELLS} image tokens, "
            f"{options.tokens} tokens decoded, median of {options.runs} prompts"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write. Returns how many parts failed."""
    options, progress = parse(arguments), Progress()
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepare(options, Path(folder))
        progress.say("model and pictures are there")
        bench = Bench(options, prepared, progress)
        bench.run()
        rows = bench.rows()
    if rows:
        ResultFile.write("vl_decode", rows, folder=options.results)
    progress.say(f"failed: {', '.join(bench.failed)}" if bench.failed else "all parts done")
    return len(bench.failed)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of this bench."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--checkpoint", type=Path, default=Path(tempfile.gettempdir()) / "bench-vl-checkpoint")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--modes", nargs="+", choices=tuple(HANDLERS), default=list(HANDLERS))
    add("--residency", type=float, default=0.45, help="room for experts, as a share of all")
    add("--prefix", type=int, default=1, help="layers pinned where compression needs one")
    add("--side", type=int, default=3, help="scenes a side of a picture, 144 image tokens each")
    add("--tokens", type=int, default=32, help="decoded after each prompt")
    add("--runs", type=int, default=3, help="prompts measured in each engine")
    add("--settling", type=int, default=12, help="answers at most, while captured steps are tried")
    add("--lessons", type=int, default=32, help="pictures that the predictor is taught with")
    add("--minutes", type=float, default=0.4, help="of that training, at most")
    add("--accelerate-tokens", type=int, default=4, help="decoded by Accelerate; 0 leaves it out")
    add("--seconds", type=float, help="begin no part that ends later; default: all")
    add("--results", type=Path, default=RESULTS, help="folder of the result file")
    add_wide_geometry(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
