"""What the engine takes for a token under each policy: teacher-forced decoding at the point's residency, so
that all read the same tokens (PSR §6.1).

Unlike everything else in a frontier this depends on the machine, and on what else it does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import torch

from hetero_runtime.assembly import Parts, assemble
from hetero_runtime.config import Config
from hetero_runtime.config.mode import eager_unless_named
from hetero_runtime.config.tree import EvictionConfig, PredictionConfig, PrefetchConfig, RoutingConfig
from hetero_runtime.errors import RequestError
from hetero_runtime.evaluation.base import TokenIds
from hetero_runtime.evaluation.frontier.base import Point
from hetero_runtime.orchestrator import Phase
from hetero_runtime.planned import plan_for

PROMPT = 16
"""First tokens of a row, which one pass reads and nobody times."""


def time_points(
    points: Sequence[Point],
    config: Config,
    rows: Sequence[TokenIds],
    *,
    calibration: str,
    done: Callable[[int, int], None] | None = None,
) -> list[Point]:
    """`points` with their `engine_ms`, the mean over the tokens of `rows` (each longer than `PROMPT`).

    The engine is loaded anew for each, as `config` says but for routing and residency. `calibration`: its
    file. A policy that the engine does not serve keeps None. Raises RequestError for a row that leaves
    nothing to time, and what loading raises.
    """
    short = [len(row) for row in rows if len(row) <= PROMPT]
    if short or not rows:
        raise RequestError(
            f"a timed row has {min(short, default=0)} tokens, and the first {PROMPT} are its prompt; time "
            "longer ones (--length)"
        )
    timed = []
    for point in points:
        served = engine_config(point, config, calibration)
        timed.append(point if served is None else replace(point, engine_ms=_ms_a_token(served, rows)))
        if done is not None:
            done(len(timed), len(points))
    return timed


def engine_config(point: Point, config: Config, calibration: str) -> Config | None:
    """`config` with the policy of `point`, and slabs that mirror its logical cache; None where the engine has
    no such policy (exact routing beside a cache by the A priority)."""
    policy = point.contender.policy
    memory = replace(
        config.memory, slabs="auto", residency=point.residency, pool="per_layer", pinned_prefix=0
    )
    plain = replace(
        eager_unless_named(config),  # not every contender can be captured, and all are to be timed alike
        memory=memory,
        routing=RoutingConfig(),
        prediction=PredictionConfig(),
        prefetch=PrefetchConfig(),
        eviction=EvictionConfig(),
    )
    if policy.name == "exact":
        return plain if policy.rules.is_lru else None
    return replace(
        plain,
        routing=RoutingConfig(
            policy=policy.name,  # type: ignore[arg-type]
            capacity=point.capacity,
            calibration=calibration,
            **asdict(policy),  # type: ignore[call-overload]
        ),
        prefetch=PrefetchConfig(schedule="bounded") if policy.looks_ahead else PrefetchConfig(),
        eviction=EvictionConfig(policy="logical"),
    )


def _ms_a_token(config: Config, rows: Sequence[TokenIds]) -> float:
    parts = assemble(plan_for(config).config)
    try:
        return 1000 * statistics.fmean(seconds for row in rows for seconds in _decode(parts, row))
    finally:
        parts.close()


def _decode(parts: Parts, row: TokenIds) -> list[float]:
    """Seconds of each token of `row` after the prompt."""
    taken = []
    with parts.sequences.open() as sequence:
        with parts.orchestrator.pass_(Phase.PREFILL, checkpoint=_go_on):
            sequence.extend(torch.tensor(row[:PROMPT], device=parts.device))
        for token in row[PROMPT:]:
            began = time.perf_counter()
            with parts.orchestrator.pass_(Phase.DECODE, checkpoint=_go_on):
                logits = sequence.extend(torch.tensor([token], device=parts.device))
            logits[0].item()  # waits for the device
            taken.append(time.perf_counter() - began)
    return taken


def _go_on() -> None:
    return
