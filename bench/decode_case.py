"""One engine, measured: a warm-up, a few decodes that carry on the replayed text, a few prompts.

warm-up | prompt, decode | prompt, decode | prompt, decode | long prompt | long prompt | long prompt
tokens of the recording, one after another ─────────────────────────────────────────────────────────►

    python -m bench.decode_case CHECKPOINT --residency 0.45 --routing routing.safetensors

measures one in a process of its own and prints its figures (`bench/figures.py`) on the last line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from bench.figures import Figures
from bench.routing import Experts, RecordedRouting
from bench.routing_replay import Replay
from hetero_runtime import graph
from hetero_runtime.assembly import Parts, assemble
from hetero_runtime.config import Config
from hetero_runtime.engine import Engine
from hetero_runtime.experts.base import ExpertStore
from hetero_runtime.graph import capture_step
from hetero_runtime.hf.conversion import expert_modules
from hetero_runtime.hf.graph_sequences import GraphSequences
from hetero_runtime.hf.hooks import attach
from hetero_runtime.orchestrator import Orchestrator
from hetero_runtime.orchestrator.device import DeviceOrchestrator
from hetero_runtime.planned import plan_for
from hetero_runtime.source import config_from

SHORT_PROMPT = 16
WARM_UP_TOKENS = 32
FIRST_TEXT_TOKEN = 3
"""Ids below are special in the checkpoints that `bench.models.random_checkpoint` writes."""


class Case(NamedTuple):
    """What differs between cases. With residency 1 every expert is loaded before the first token."""

    policy: str
    residency: float
    mode: str = "eager"
    misses: str = "load"

    @property
    def percent(self) -> str:
        """As row ids have it: 45, 25, all."""
        return "all" if self.residency == 1 else f"{100 * self.residency:.0f}"


class Plan(NamedTuple):
    """What all cases share."""

    checkpoint: Path
    device: str
    tokens: int
    """Decoded in each repetition."""
    prompts: tuple[int, ...]
    """Tokens of the prompts whose first token is timed."""
    runs: int

    @property
    def max_length(self) -> int:
        """The longest sequence of all."""
        return max([SHORT_PROMPT + max(self.tokens, WARM_UP_TOKENS), *self.prompts]) + 1


class Decode(NamedTuple):
    """One repetition of decode; `stall_share` of its time."""

    tok_s: float
    hit_rate: float
    bytes_token: float
    stall_share: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The repetitions of one case, and their medians.

    `ttfts_ms` by prompt length. `load_s`: all of loading; `start_s`: the part of it that capturing took, None
    for an eager engine.
    """

    case: Case
    decodes: tuple[Decode, ...]
    ttfts_ms: dict[int, tuple[float, ...]]
    slabs: int
    load_s: float
    start_s: float | None = None

    @property
    def all_tok_s(self) -> list[float]:
        return [decode.tok_s for decode in self.decodes]

    @property
    def tok_s(self) -> float:
        return statistics.median(self.all_tok_s)

    @property
    def hit_rate(self) -> float:
        """Mean, since repetitions are different stretches of text."""
        return statistics.mean(decode.hit_rate for decode in self.decodes)

    @property
    def bytes_token(self) -> float:
        return statistics.mean(decode.bytes_token for decode in self.decodes)

    @property
    def stall_share(self) -> float:
        return statistics.mean(decode.stall_share for decode in self.decodes)

    def ttft_ms(self, num_tokens: int) -> float:
        """Median time to the first token after a prompt of that length, one of the plan's."""
        return statistics.median(self.ttfts_ms[num_tokens])

    def __str__(self) -> str:
        ttfts = ", ".join(f"{length}: {self.ttft_ms(length):.0f} ms" for length in self.ttfts_ms)
        return (
            f"{self.case.mode} {self.case.policy} {self.case.percent}: {self.tok_s:.3g} tok/s, "
            f"hits {100 * self.hit_rate:.1f} %, {self.bytes_token / 1e6:.0f} MB a token, "
            f"stalled {100 * self.stall_share:.0f} %, TTFT {ttfts or '-'}, loaded in {self.load_s:.1f} s"
        )


def measure_case(plan: Plan, case: Case, routing: Experts | None) -> Measured:
    """Load an engine for `case` and measure it.

    `routing`: `[tokens, layers, top_k]`, long enough for all decodes and for each prompt (prompts after the
    decodes may meet its beginning again); None leaves the routers their say. Raises ValueError when it is
    too short.
    """
    decoded = SHORT_PROMPT + WARM_UP_TOKENS + plan.runs * (SHORT_PROMPT + plan.tokens)
    needed = max([decoded, *plan.prompts])
    if routing is not None and len(routing) < needed:
        raise ValueError(f"the routing has {len(routing)} tokens, {needed} are needed: record more")
    return measure_loaded(plan, case, load(plan, case, routing))


def measure_loaded(plan: Plan, case: Case, loaded: Loaded) -> Measured:
    """Measure an engine that is ready for `case`, and close it."""
    with loaded.engine as engine:
        engine.generate(make_prompt(SHORT_PROMPT), max_tokens=WARM_UP_TOKENS, ignore_eos=True)
        prompt = make_prompt(SHORT_PROMPT)
        decodes = tuple(decode(engine, prompt, plan.tokens)[0] for _ in range(plan.runs))
        ttfts = {length: _first_tokens_ms(engine, length, plan.runs) for length in plan.prompts}
        engine.check()
    return Measured(
        case=case,
        decodes=decodes,
        ttfts_ms=ttfts,
        slabs=loaded.slabs,
        load_s=loaded.load_s,
        start_s=loaded.start_s,
    )


class Loaded(NamedTuple):
    """An engine that is ready, and how long that took; `start_s` as in `Measured`."""

    engine: Engine
    slabs: int
    load_s: float
    start_s: float | None
    record_bytes: int
    """Of an expert."""
    parts: Parts
    """What the engine is made of."""


def load(plan: Plan, case: Case, routing: Experts | None) -> Loaded:
    """An engine for `case`, whose experts `routing` chooses, or its own routers."""
    words = {"eviction": {"policy": case.policy}, "misses": {"handler": case.misses}}
    if routing is None:
        return opened(plan, case, words)
    return opened(plan, case, words, replay=partial(replay_experts, routing=routing))


def opened(
    plan: Plan,
    case: Case,
    words: Mapping[str, Any],
    *,
    replay: Callable[[Parts], object] | None = None,
    store: ExpertStore | None = None,
) -> Loaded:
    """An engine for `case`. `words`: what its configuration says besides. `replay`: puts a recording into the
    model; a captured step is captured once more, with that inside. `store`: as for `assemble`."""
    began = time.perf_counter()
    with _captures_timed() as captures:
        planned = plan_for(config_of(plan, case, words))
        parts = assemble(planned.config, store=store)
    load_s = time.perf_counter() - began
    if case.mode == "graph" and not captures:
        raise RuntimeError(f"{case} was to be captured and is not; the log says why")
    if replay is not None:
        replay(parts)
        capture_anew(parts)
    start_s = sum(captures) if captures else None
    return Loaded(Engine(parts), parts.slabs.num_slabs, load_s, start_s, parts.slabs.record_bytes, parts)


def config_of(plan: Plan, case: Case, words: Mapping[str, Any]) -> Config:
    """What `opened` loads an engine by."""
    overrides = {
        "device": plan.device,
        "memory": {"pinned_prefix": "all"} if case.residency == 1 else {"residency": case.residency},
        "execution": {"mode": case.mode, "max_rows": 1, "max_length": plan.max_length},
        **words,
    }
    return config_from(plan.checkpoint, overrides)


def capture_anew(parts: Parts) -> None:
    """Capture the step once more, where it was captured, with what the model does now."""
    if isinstance(parts.sequences, GraphSequences) and isinstance(parts.orchestrator, DeviceOrchestrator):
        capture_step(parts.sequences, parts.orchestrator)


def settle(orchestrator: Orchestrator, decode: Callable[[int], object], most: int) -> None:
    """`decode` until all captured steps were tried, `most` times at most; it is told how often before."""
    for number in range(most):
        if orchestrator.is_settled:
            return
        decode(number)


def replay_experts(parts: Parts, *, routing: Experts) -> Replay:
    """From now on `routing`, `[tokens, layers, top_k]`, says which experts run, whatever the routers say.
    Returns who says it."""
    replay = Replay(parts.orchestrator.run_layer, routing, parts.device)
    attach(list(expert_modules(parts.model).values()), replay)
    return replay


@contextmanager
def _captures_timed() -> Iterator[list[float]]:
    """Seconds of each capture inside that succeeds: compiling, warming up, checking, capturing."""
    capture, seconds = graph.capture, list[float]()

    def timed(*arguments: Any, **named: Any) -> graph.GraphParts:
        began = time.perf_counter()
        parts = capture(*arguments, **named)
        seconds.append(time.perf_counter() - began)
        return parts

    with patch.object(graph, "capture", timed):
        yield seconds


def _first_tokens_ms(engine: Engine, num_tokens: int, runs: int) -> tuple[float, ...]:
    """Times to the first token after a prompt of that length, without the first one: its kernels compile."""
    prompt = make_prompt(num_tokens)
    passes = [engine.generate(prompt, max_tokens=1).timings.ttft_s for _ in range(1 + runs)]
    return tuple(1e3 * seconds for seconds in passes[1:])


def decode(engine: Engine, prompt: Sequence[int], num_tokens: int) -> tuple[Decode, tuple[int, ...]]:
    """`num_tokens` steps behind `prompt`, and what was said: one token more."""
    before = engine.stats().decode
    completion = engine.generate(list(prompt), max_tokens=num_tokens + 1, ignore_eos=True)
    after = engine.stats().decode
    cache, passes = after.cache - before.cache, after.passes - before.passes
    assert passes >= num_tokens, f"{passes} decode passes for {num_tokens} tokens"  # some may run ahead
    decoded = Decode(
        tok_s=completion.timings.tok_s,
        hit_rate=cache.hit_rate,
        bytes_token=cache.bytes_moved / passes,
        stall_share=(after.stall_s - before.stall_s) / (after.seconds - before.seconds),
    )
    return decoded, completion.token_ids


def make_prompt(num_tokens: int) -> list[int]:
    """The prompt of that length that all engines get."""
    return [FIRST_TEXT_TOKEN + i % 200 for i in range(num_tokens)]


def figures_of(measured: Measured) -> Figures:
    """What another engine is compared with."""
    is_cuda = torch.cuda.is_available()
    return Figures(
        engine="hetero_runtime",
        residency=measured.case.residency,
        tok_s=measured.tok_s,
        all_tok_s=tuple(measured.all_tok_s),
        ttfts_ms={length: measured.ttft_ms(length) for length in measured.ttfts_ms},
        hit_rate=measured.hit_rate if measured.case.residency < 1 else None,
        slots=measured.slabs,
        peak_vram_gib=torch.cuda.max_memory_allocated() / 2**30 if is_cuda else 0.0,
        load_s=measured.load_s,
        start_s=measured.start_s,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure one residency and print it as JSON."""
    parser = case_parser(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args(arguments)
    plan = Plan(options.checkpoint, options.device, options.tokens, tuple(options.prompts), options.runs)
    case = Case("lru", options.residency, "graph" if options.device == "cuda" else "eager")
    routing = None
    if options.routing is not None:
        routing = RecordedRouting.load(options.routing).laid_over(**model_sizes(options.checkpoint))
    measured = measure_case(plan, case, routing)
    print(measured, flush=True)
    figures_of(measured).print()


def case_parser(description: str | None) -> argparse.ArgumentParser:
    """The options of a process that measures one case, ours or a peer's."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--residency", type=float, default=0.45, help="1: all experts resident")
    parser.add_argument("--routing", type=Path, help="what bench.routing_replay recorded; default: its own")
    parser.add_argument("--tokens", type=int, default=128, help="decoded in each repetition")
    parser.add_argument("--prompts", type=int, nargs="*", default=[], help="lengths, for the TTFT")
    parser.add_argument("--runs", type=int, default=3)
    return parser


def model_sizes(checkpoint: Path) -> dict[str, int]:
    """What a recorded routing is laid over: `layers`, `experts` and `top_k` of a Qwen3-MoE checkpoint."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    names = {"layers": "num_hidden_layers", "experts": "num_experts", "top_k": "num_experts_per_tok"}
    return {name: config[key] for name, key in names.items()}


if __name__ == "__main__":
    main()
