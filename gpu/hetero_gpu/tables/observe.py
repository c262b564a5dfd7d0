"""What a use makes of an expert's eviction score: by one function, whoever observes it."""

from __future__ import annotations

import triton
import triton.language as tl

from hetero_scheduler import EVICTION_POLICIES
from hetero_scheduler.eviction import FOLLOWING_POLICIES, FORECAST_POLICIES

_POLICIES = EVICTION_POLICIES + FORECAST_POLICIES + FOLLOWING_POLICIES
_LRU, _LFU = tl.constexpr(_POLICIES.index("lru")), tl.constexpr(_POLICIES.index("lfu"))
_BELADY = tl.constexpr(_POLICIES.index("belady"))
_LOOKAHEAD = tl.constexpr(_POLICIES.index("lookahead"))


def policy_number(name: str) -> int:
    """What kernels call an eviction policy."""
    return _POLICIES.index(name)


@triton.jit  # type: ignore[untyped-decorator]
def observed(old_score, passes, layers_run, POLICY: tl.constexpr, HALF_LIFE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Scores of a row of experts if all of them were used now; `hetero_scheduler.eviction` has the why."""
    if POLICY == _LRU:
        new_score = tl.zeros_like(old_score) + layers_run.to(tl.float64)
    elif POLICY == _LFU:
        new_score = old_score + 1.0
    elif POLICY == _BELADY:  # forecasts score elsewhere, from 0 upwards; below 0 are those without any
        new_score = tl.where(old_score < 0, -1.0 / layers_run.to(tl.float64), old_score)
    elif POLICY >= _LOOKAHEAD:  # it and those that follow a routing policy are scored elsewhere
        new_score = old_score
    else:
        log_now = tl.zeros_like(old_score) + passes.to(tl.float64) / tl.full((), HALF_LIFE, tl.float64)
        high, low = tl.maximum(old_score, log_now), tl.minimum(old_score, log_now)
        new_score = high + tl.log2(1.0 + tl.exp2(low - high))
    return new_score
