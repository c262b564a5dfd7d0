"""One routing policy at one residency, measured step by step on recorded router logits.

    recording    | text 0 ................................ | text 1 ........ | ...
    run          | prompt | settle | counted ............. |
                                       timed: every step's end is seen

The recording is one of text, and the engine says that text: its routers say the recorded logits, its head the
recorded tokens. So all policies read the same, from the same place, whatever they choose.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from bench.traces.routers import Recital, recite, recited_choosers, say_tokens
from hetero_gpu import CacheStats
from hetero_runtime.assembly import Parts
from hetero_runtime.engine import Engine
from hetero_runtime.hf.graph_sequences import GraphSequences
from hetero_runtime.hf.router_choice import let_choose
from hetero_runtime.hf.router_hooks import routed_layers, router_top_k
from hetero_runtime.routing import RoutingStats
from hetero_runtime.routing.captured import CapturedRouting
from hetero_runtime.stepping import graph
from hetero_scheduler.trace import Trace

PROMPT = 16
UNDER_WAY = 3
"""Steps that may be under way, or done and not yet delivered, when counters are read: they are not timed."""
BONUS = 0.2
PAPER_BONUS = {0.5: 0.3, 0.25: 0.25}
"""By residency: the lambda of PSR that is compared with Cache-Prior at 0.2 (PSR §1, §6.2, Table 4)."""
POLICIES = ("lru", "cache_prior", "paper", "psr")
"""Exact routing with LRU; Cache-Prior, and PSR as its preset has it, both at a lambda of `BONUS`; PSR at that
of PAPER_BONUS. Besides, `cache_prior:LAMBDA` and `psr:LAMBDA:INSERTIONS:WINDOW`, whose last numbers may be
left out."""
_NUMBERS = {"lru": (), "cache_prior": ("bonus",), "psr": ("bonus", "insertions", "window"), "paper": ()}


class Stretch(NamedTuple):
    """What is decoded after each prompt. The first `settle` tokens are not timed: a text's logical cache
    begins with the warm set, whose copies are part of reading a prompt (PSR §4.2)."""

    settle: int
    tokens: int

    @property
    def window(self) -> int:
        """Tokens of the recording that a run takes."""
        return PROMPT + self.settle + UNDER_WAY + self.tokens + 1


@dataclass(frozen=True)
class Run:
    """One text. `steps_ms`: of each timed step. `cache` and `routing`: counted over these steps, and up to
    `UNDER_WAY` before."""

    steps_ms: list[float]
    cache: CacheStats
    routing: RoutingStats


@dataclass(frozen=True)
class Steps:
    """All runs of a policy. ms are of a step; counts are of a token, all layers together.

    `pairs`: experts that a token takes, all layers together.
    """

    runs: tuple[Run, ...]
    pairs: int

    @property
    def means_ms(self) -> list[float]:
        """Of each run."""
        return [statistics.fmean(run.steps_ms) for run in self.runs]

    @property
    def mean_ms(self) -> float:
        """Median over the runs."""
        return statistics.median(self.means_ms)

    @property
    def p50_ms(self) -> float:
        """Median over the runs."""
        return statistics.median(statistics.median(run.steps_ms) for run in self.runs)

    @property
    def p99_ms(self) -> float:
        """Of the steps of all runs."""
        return float(np.percentile([ms for run in self.runs for ms in run.steps_ms], 99))

    @property
    def hit_rate(self) -> float:
        """Resident before their layer began, of the experts that were executed."""
        return self._sum("hits") / self._sum("required")

    @property
    def copies(self) -> float:
        """Experts that crossed the link for whatever reason."""
        return self._sum("loads") / self._tokens

    @property
    def demand_copies(self) -> float:
        """Experts that were loaded when their layer asked for them."""
        return self._sum("misses") / self._tokens

    @property
    def late(self) -> float:
        """Prefetched ones that were still on the link then."""
        return self._sum("late") / self._tokens

    @property
    def dropped(self) -> float:
        """Prefetches that had not arrived when their layer ran without them."""
        return self._sum("prefetches_dropped") / self._tokens

    @property
    def moved_mb(self) -> float:
        """Bytes over the link."""
        return self._sum("bytes_moved") / self._tokens / 1e6

    @property
    def logical(self) -> dict[str, float]:
        """What the policy decided: see RoutingStats.per_token."""
        total = sum((run.routing for run in self.runs), RoutingStats())
        return {name: count / self._tokens for name, count in total.per_token(1).items()}

    @property
    def _tokens(self) -> float:
        """As the device counted: it may be ahead of what was delivered."""
        return self._sum("required") / self.pairs

    def _sum(self, counter: str) -> int:
        return sum(getattr(run.cache, counter) for run in self.runs)

    def __str__(self) -> str:
        return (
            f"p50 {self.p50_ms:.3f} ms, p99 {self.p99_ms:.3f}, mean {self.mean_ms:.3f}; hits "
            f"{100 * self.hit_rate:.1f} %, copies a token {self.copies:.1f}, on demand "
            f"{self.demand_copies:.1f}, late {self.late:.1f}, dropped {self.dropped:.2f}, "
            f"{self.moved_mb:.0f} MB"
        )


def words_of(policy: str, residency: float, calibration: Path) -> dict[str, Any]:
    """What the configuration of `policy` says: as many slabs in every layer, whoever chooses.

    Raises ValueError for `paper` at a residency where it compares nothing.
    """
    memory = {"residency": residency, "pool": "per_layer"}
    if policy == "lru":
        return {"preset": "lru", "memory": memory}
    routing = {"bonus": BONUS, "calibration": str(calibration)}
    routing |= numbers_of(policy)
    if policy == "paper":
        if residency not in PAPER_BONUS:
            known = ", ".join(map(str, PAPER_BONUS))
            raise ValueError(f"{residency:g} resident is nothing that the paper compares; it has {known}")
        routing["bonus"] = PAPER_BONUS[residency]
    if is_steered(policy):
        return {"preset": "psr", "memory": memory, "routing": routing}
    return {
        "memory": memory,
        "routing": routing | {"policy": "cache_prior"},
        "eviction": {"policy": "logical"},
        "prefetch": {"schedule": "none"},
    }


def is_steered(policy: str) -> bool:
    """Whether it is PSR, with whatever numbers."""
    return policy.split(":")[0] in ("psr", "paper")


def numbers_of(policy: str) -> dict[str, Any]:
    """What `policy` says besides its name. Raises ValueError for a word that is no policy."""
    name, *numbers = policy.split(":")
    if len(numbers) > len(_NUMBERS.get(name, ())) or name not in _NUMBERS:
        raise ValueError(
            f"{policy!r} is no policy; known: lru, cache_prior[:LAMBDA], paper, "
            "psr[:LAMBDA[:INSERTIONS[:WINDOW]]]"
        )
    given = zip(_NUMBERS[name], numbers, strict=False)
    return {key: float(number) if key == "bonus" else int(number) for key, number in given}


def recite_in(parts: Parts, trace: Trace) -> Recital:
    """From now on the model of `parts` says `trace`, and the routing policy chooses from what it says."""
    routing = parts.routing
    looks_ahead = routing is not None and routing.policy.looks_ahead
    num_layers = len(routed_layers(parts.model))
    recital = Recital(trace, num_layers=num_layers, device=parts.device, asks_early=looks_ahead)
    say_tokens(parts.model, recital)
    if routing is None:
        recite(parts.model, recital)
    elif isinstance(parts.sequences, GraphSequences):
        steered = parts.sequences.texts
        assert isinstance(steered, CapturedRouting), "a routing policy, and nobody decides in the step"
        routers = recited_choosers(parts.model, recital)
        steered.attach(parts.model, parts.sequences.tokens, routers=routers)
    else:
        recite(parts.model, recital)
        let_choose(parts.model, routing.choose, looks_ahead=looks_ahead)
    return recital


def measure_steps(
    engine: Engine, parts: Parts, recital: Recital, *, texts: Mapping[int, list[int]], stretch: Stretch
) -> Steps:
    """Decode one text after another. `texts`: by the token of the recording that it begins with, tokens
    `[stretch.window]`."""
    runs = []
    with patch.object(graph, "MOST_STEPS", 1):  # so that the end of every step is seen
        for begin, tokens in texts.items():
            recital.seek(begin)
            runs.append(_run(engine, tokens, stretch))
    engine.check()
    pairs = len(routed_layers(parts.model)) * router_top_k(parts.model)
    return Steps(tuple(runs), pairs)


def _run(engine: Engine, tokens: list[int], stretch: Stretch) -> Run:
    row = engine.open(tokens[:PROMPT], max_tokens=stretch.window - PROMPT, temperature=0.0, ignore_eos=True)
    said, ends_s = list[int | None](), list[float]()
    before = engine.stats().decode
    for delta in row.deltas():
        said.append(delta.token_id)
        if len(said) == 1 + stretch.settle:
            before = engine.stats().decode
        if len(said) > stretch.settle + UNDER_WAY:
            ends_s.append(time.perf_counter())
    if said != tokens[PROMPT:]:
        raise RuntimeError(f"the recording says {tokens[PROMPT:][:8]}..., the engine said {said[:8]}...")
    after = engine.stats().decode
    steps_ms = [1e3 * (end - begin) for begin, end in pairwise(ends_s)]
    return Run(steps_ms, after.cache - before.cache, after.routing - before.routing)
