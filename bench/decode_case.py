"""One engine, measured: a warm-up, a few decodes that carry on the replayed text, a few prompts.

warm-up | prompt, decode | prompt, decode | prompt, decode | long prompt | long prompt | long prompt
tokens of the recording, one after another ─────────────────────────────────────────────────────────►
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bench.routing import Experts
from bench.routing_replay import Replay
from hetero_runtime.assembly import assemble
from hetero_runtime.engine import Engine, config_from
from hetero_runtime.graph import capture_step
from hetero_runtime.hf.conversion import expert_modules
from hetero_runtime.hf.graph_sequences import GraphSequences
from hetero_runtime.hf.hooks import attach
from hetero_runtime.orchestrator.device import DeviceOrchestrator
from hetero_runtime.planned import plan_for

SHORT_PROMPT = 16
WARM_UP_TOKENS = 32
FIRST_TEXT_TOKEN = 3
"""Ids below are special in the checkpoints that `bench.models.random_checkpoint` writes."""


class Case(NamedTuple):
    """What differs between cases. With residency 1 every expert is loaded before the first token."""

    policy: str
    residency: float
    mode: str = "eager"

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
    prompt: int
    """Tokens of the long prompt."""
    runs: int


class Decode(NamedTuple):
    """One repetition of decode; `stall_share` of its time."""

    tok_s: float
    hit_rate: float
    bytes_token: float
    stall_share: float


@dataclass(frozen=True)
class Measured:
    """The repetitions of one case, and their medians."""

    case: Case
    decodes: tuple[Decode, ...]
    ttfts_ms: tuple[float, ...]
    prompt_tokens: int
    load_s: float

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

    @property
    def ttft_ms(self) -> float:
        return statistics.median(self.ttfts_ms)

    def __str__(self) -> str:
        return (
            f"{self.case.mode} {self.case.policy} {self.case.percent}: {self.tok_s:.3g} tok/s, "
            f"hits {100 * self.hit_rate:.1f} %, {self.bytes_token / 1e6:.0f} MB a token, "
            f"stalled {100 * self.stall_share:.0f} %, TTFT {self.ttft_ms:.0f} ms, "
            f"loaded in {self.load_s:.1f} s"
        )


def measure_case(plan: Plan, case: Case, routing: Experts) -> Measured:
    """Load an engine for `case` and measure it. `routing`: `[tokens, layers, top_k]`, long enough for all.

    Raises ValueError when it is not.
    """
    needed = SHORT_PROMPT + WARM_UP_TOKENS + plan.runs * (SHORT_PROMPT + plan.tokens + plan.prompt)
    if len(routing) < needed:
        raise ValueError(f"the routing has {len(routing)} tokens, {needed} are needed: record more")
    began = time.perf_counter()
    engine = _load(plan, case, routing)
    load_s = time.perf_counter() - began
    with engine:
        engine.generate(make_prompt(SHORT_PROMPT), max_tokens=WARM_UP_TOKENS, ignore_eos=True)
        decodes = tuple(_decode(engine, plan.tokens) for _ in range(plan.runs))
        long_prompt = make_prompt(plan.prompt)
        firsts = [engine.generate(long_prompt, max_tokens=1).timings.ttft_s for _ in range(plan.runs)]
        engine.check()
    return Measured(case, decodes, tuple(1e3 * first for first in firsts), plan.prompt, load_s)


def _load(plan: Plan, case: Case, routing: Experts) -> Engine:
    """An engine whose experts are chosen by `routing`."""
    longest = max(plan.prompt, SHORT_PROMPT + max(plan.tokens, WARM_UP_TOKENS))
    overrides = {
        "device": plan.device,
        "memory": {"pinned_prefix": "all"} if case.residency == 1 else {"residency": case.residency},
        "eviction": {"policy": case.policy},
        "execution": {"mode": case.mode, "max_rows": 1, "max_length": longest + 1},
    }
    parts = assemble(plan_for(config_from(plan.checkpoint, overrides)).config)
    replay = Replay(parts.orchestrator.run_layer, routing, parts.device)
    attach(list(expert_modules(parts.model).values()), replay)
    if isinstance(parts.sequences, GraphSequences) and isinstance(parts.orchestrator, DeviceOrchestrator):
        capture_step(parts.sequences, parts.orchestrator)  # once more, with the recorded routing inside
    return Engine(parts)


def _decode(engine: Engine, num_tokens: int) -> Decode:
    before = engine.stats().decode
    completion = engine.generate(make_prompt(SHORT_PROMPT), max_tokens=num_tokens + 1, ignore_eos=True)
    after = engine.stats().decode
    cache, passes = after.cache - before.cache, after.passes - before.passes
    assert passes == num_tokens, f"{passes} decode passes for {num_tokens} tokens"
    return Decode(
        tok_s=completion.timings.tok_s,
        hit_rate=cache.hit_rate,
        bytes_token=cache.bytes_moved / passes,
        stall_share=(after.stall_s - before.stall_s) / (after.seconds - before.seconds),
    )


def make_prompt(num_tokens: int) -> list[int]:
    """The prompt of that length that all engines get."""
    return [FIRST_TEXT_TOKEN + i % 200 for i in range(num_tokens)]
