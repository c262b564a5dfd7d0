"""Profile of pinned prefixes: the same prompts with every prefix, in the same room (VisMMOE §4.3.4).

Too shallow a prefix leaves nothing to overlap with, too deep a one leaves the slabs too few: a U.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetero_runtime.assembly import assemble
from hetero_runtime.config import Config, ResolvedConfig
from hetero_runtime.config.mode import in_mode
from hetero_runtime.engine import Engine
from hetero_runtime.errors import ConfigError, RequestError
from hetero_runtime.lookahead.profile import PrefixPoint, PrefixProfile
from hetero_runtime.plan.geometry import Geometry
from hetero_runtime.plan.prefix import valid_prefixes
from hetero_runtime.planned import plan_for
from hetero_runtime.prompt import Prompt

MOST_PREFIXES = 12
"""Prefixes that are measured unless they are named: more are thinned out evenly."""
Done = Callable[[int, int], None]
"""Told of prefixes done, and how many there are."""


@dataclass(frozen=True)
class ProfileOptions:
    """What every prefix serves."""

    max_tokens: int = 32
    """Of each answer; greedy, so that all prefixes say the same."""
    prefixes: tuple[int, ...] = ()
    """Which ones; empty: those that fit, evenly."""


def profile_prefixes(
    config: Config, prompts: Sequence[Prompt], *, options: ProfileOptions, done: Done | None = None
) -> PrefixProfile:
    """Serve `prompts` with one prefix after another, an engine each, after one prompt that is not counted.
    Experts are read once and handed on.

    The room is what `config` gives to slabs and prefix together. Raises RequestError without a prompt,
    ConfigError for a prefix that does not fit there, and what loading raises.
    """
    if not prompts:
        raise RequestError("there is no prompt to profile with; give one text or more")
    planned = plan_for(config)
    memory, geometry = planned.config.memory, planned.memory.geometry
    room = memory.pinned_prefix * geometry.num_experts + memory.slabs
    valid = valid_prefixes(geometry, room, semantic_depth=0, pool=memory.pool)
    prefixes = options.prefixes or _thinned(valid)
    for pinned in prefixes:
        if pinned not in valid:
            raise ConfigError(
                f"--prefixes {pinned}: does not fit, with the slabs that it needs, where there is room for "
                f"{room} experts; write 0 to {valid.stop - 1}"
            )
    alike = in_mode(config, planned.config.execution.mode)
    configs = [plan_for(_pinned(alike, geometry, pinned, room)).config for pinned in prefixes]
    points = _measured(configs, prompts, max_tokens=options.max_tokens, done=done)
    return PrefixProfile(planned.config.device, room, points)


def _thinned(valid: range) -> tuple[int, ...]:
    count = min(len(valid), MOST_PREFIXES)
    return tuple(sorted({valid[round(i * (len(valid) - 1) / max(1, count - 1))] for i in range(count)}))


def _pinned(config: Config, geometry: Geometry, pinned: int, room: int) -> Config:
    slabs = room - pinned * geometry.num_experts
    if config.memory.pool == "per_layer" and pinned < geometry.num_moe_layers:
        slabs -= slabs % (geometry.num_moe_layers - pinned)
    return replace(config, memory=replace(config.memory, pinned_prefix=pinned, slabs=slabs, residency=None))


def _measured(
    configs: Sequence[ResolvedConfig], prompts: Sequence[Prompt], *, max_tokens: int, done: Done | None
) -> tuple[PrefixPoint, ...]:
    """All of them planned before, while memory is as each of them will find it."""
    points, store = list[PrefixPoint](), None
    try:
        for config in configs:
            lent, store = store, None
            with Engine(assemble(config, store=lent)) as engine:
                points.append(_measure(engine, prompts, max_tokens=max_tokens))
                if len(points) < len(configs):
                    store = engine.release()
            if done is not None:
                done(len(points), len(configs))
    finally:
        if store is not None:
            store.close()
    return tuple(points)


def _measure(engine: Engine, prompts: Sequence[Prompt], *, max_tokens: int) -> PrefixPoint:
    options: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": True}
    engine.generate(prompts[0], **options)
    before = engine.stats()
    for prompt in prompts:
        engine.generate(prompt, **options)
    after, memory = engine.stats(), engine.config.memory
    prefill_s = after.prefill.seconds - before.prefill.seconds
    decode_s = after.decode.seconds - before.decode.seconds
    hits = (after.decode.cache - before.decode.cache).hit_rate
    return PrefixPoint(memory.pinned_prefix, memory.slabs, prefill_s + decode_s, prefill_s, decode_s, hits)
