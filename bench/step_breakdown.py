"""Where the time of a captured decode step goes, by kind of work, at several residencies.

`python -m bench.step_breakdown --routing routing.safetensors [--checkpoint FOLDER]`; model and routing are
those of `bench/eager_decode.py`. Writes step_breakdown.json, a picture, and a Chrome trace of a few steps.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.decode_case import SHORT_PROMPT, WARM_UP_TOKENS, Case, load, make_prompt
from bench.eager_decode import Prepared, free_device, parse, prepare
from bench.harness import ResultFile, Row, attempt
from bench.routing import RoutingFacts
from bench.step_time import ALL_KINDS, HOST, IDLE, LONGEST_IDLE_US, OTHER, StepTime, Work
from hetero_runtime.engine import Engine
from hetero_runtime.profiling import trace_to

DEVICE = "cuda"
CASES = (Case("lru", 1.0, "graph"), Case("lru", 0.45, "graph"), Case("lru", 0.25, "graph"))
STEPS = 16
TRACED_CASE, TRACED_STEPS = CASES[1], 4
LARGEST_TRACE = 300_000


def rows_of(case: Case, step: StepTime, *, note: str, plain_us: float) -> list[Row]:
    """µs of a mean step by kind, and in total. `plain_us`: what a token takes when nobody looks."""
    percent, kernels = case.percent, sum(step.kernels.values())
    total = f"{kernels:.0f} kernels and copies a step; {plain_us:.0f} us when not profiled; {note}"
    notes = {kind: f"{count:.0f} kernels and copies a step" for kind, count in step.kernels.items()}
    notes[IDLE] = f"gaps of up to {LONGEST_IDLE_US:.0f} us"
    notes[HOST] = f"gaps of more than {LONGEST_IDLE_US:.0f} us, profiling included"
    for name, us in sorted(step.unknown.items(), key=lambda item: -item[1])[:4]:
        notes[OTHER] += f"; {us:.1f} us {name:.60}"
    return [
        Row(id=f"breakdown.total_us_{percent}", value=step.total_us, unit="us", note=total),
        *(
            Row(id=f"breakdown.{kind}_us_{percent}", value=step.us[kind], unit="us", note=notes[kind])
            for kind in ALL_KINDS
        ),
    ]


def measure_case(prepared: Prepared, case: Case, trace: Path | None) -> list[Row]:
    """Load an engine for `case`, warm it up, and break its steps down."""
    plan, routing, geometry = prepared
    note = f"{geometry.layers} layers; {RoutingFacts.of(routing, geometry.experts)}"
    loaded = load(plan, case, routing)
    with loaded.engine as engine:
        engine.generate(make_prompt(SHORT_PROMPT), max_tokens=WARM_UP_TOKENS, ignore_eos=True)
        plain = engine.generate(make_prompt(SHORT_PROMPT), max_tokens=plan.tokens, ignore_eos=True)
        works, num_steps = profile_steps(engine, STEPS)
        if trace is not None:
            write_trace(engine, trace)
    step = StepTime.of(works, num_steps=num_steps)
    return rows_of(case, step, note=note, plain_us=1e6 / plain.timings.tok_s)


def profile_steps(
    engine: Engine, num_steps: int, prompt: Sequence[int] | None = None
) -> tuple[list[Work], int]:
    """What the device did in about `num_steps` decode steps behind `prompt`, and in how many exactly."""
    ids = make_prompt(SHORT_PROMPT) if prompt is None else list(prompt)
    row = engine.open(ids, max_tokens=1 + num_steps, ignore_eos=True)
    deltas = row.deltas()
    next(deltas)  # the prompt
    _synchronize()
    before = engine.stats().decode.passes
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in deltas:
            pass
        _synchronize()
    return works_of(profiler.events() or ()), engine.stats().decode.passes - before


def works_of(events: Iterable[Any]) -> list[Work]:
    """Kernels and copies among the profiler's events; ranges that it shows on the device are neither."""
    return [
        Work(event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]


def write_trace(engine: Engine, path: Path) -> None:
    """A Chrome trace of a few steps, unless it comes out too large to be kept."""
    path.parent.mkdir(parents=True, exist_ok=True)
    deltas = engine.stream(make_prompt(SHORT_PROMPT), max_tokens=1 + TRACED_STEPS, ignore_eos=True)
    next(deltas)
    _synchronize()
    with trace_to(path):
        for _ in deltas:
            pass
    num_bytes = path.stat().st_size
    print(f"{path.name}: {num_bytes / 1e3:.0f} kB", flush=True)
    if num_bytes > LARGEST_TRACE:
        path.unlink()
        print(f"not kept: more than {LARGEST_TRACE / 1e3:.0f} kB", flush=True)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure_all(options: argparse.Namespace) -> tuple[list[Row], int]:
    """Rows of every case that succeeded, and how many did not."""
    prepared, rows, num_failed = prepare(options), list[Row](), 0
    for case in CASES:
        trace = options.results / "step_trace.json.gz" if case == TRACED_CASE else None
        measured = attempt(str(case), partial(measure_case, prepared, case, trace))
        rows += measured or []
        num_failed += measured is None
        free_device()
    return rows, num_failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write, draw. Returns how many cases failed."""
    options = parse(arguments, __doc__)
    rows, num_failed = measure_all(options)
    if rows:
        ResultFile.write("step_breakdown", rows, folder=options.results)
        _draw(options.results)
    return num_failed


def _draw(folder: Path) -> None:
    try:
        from bench.plots import draw_step_breakdown
    except ImportError as error:
        print(f"no picture: {error}; draw it elsewhere: python -m bench.plots", flush=True)
        return
    draw_step_breakdown(folder)


if __name__ == "__main__":
    sys.exit(main())
