"""Block selection in plain Python: sets and sorting, one obvious line for each line of PSR's appendix B.

Slow, and used by tests alone: `block_step.py` must make the same decisions.
"""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import numpy.typing as npt

from hetero_scheduler.routing.block_selection import BlockSelection

Floats = npt.NDArray[np.float32]


def eligible_set(
    policy: BlockSelection,
    shares: npt.NDArray[np.float64],
    own: list[list[int]],
    *,
    weights: list[float],
    resident: set[int],
) -> set[int]:
    """The experts that positions may choose. `shares` `[n, E]`: the router's softmax; `own`: its choices."""
    demand: dict[int, float] = defaultdict(float)  # u
    for d, chosen in enumerate(own):
        for e in chosen:
            demand[e] += weights[d] * shares[d, e]
    root = set(own[0])  # A
    others = sorted((e for e in demand if e not in root and demand[e] > 0), key=lambda e: (-demand[e], e))
    if not others:
        return root
    total = sum(demand[e] for e in others)
    entropy = -sum(demand[e] / total * math.log(demand[e] / total) for e in others)  # H
    picked = others[: min(math.ceil(policy.growth * math.exp(entropy)), len(others))]
    budget = policy.rerouting * sum(demand[e] for e in sorted(demand))
    left_out: list[int] = []
    for e in (e for e in reversed(picked) if e not in resident):
        if sum(demand[x] for x in [*left_out, e]) > budget:
            break
        left_out.append(e)
    return root | (set(picked) - set(left_out))


def choose(scores: Floats, own: list[int], allowed: set[int]) -> list[int]:
    """The best `top_k` of `allowed` that the router does not exclude; its own where that is not enough. Those
    of its own first, in its order."""
    possible = sorted((e for e in allowed if scores[e] != -math.inf), key=lambda e: (-scores[e], e))
    chosen = possible[: len(own)]
    chosen += [e for e in own if e not in chosen][: len(own) - len(chosen)]
    return [e for e in own if e in chosen] + [e for e in chosen if e not in own]


def select(
    policy: BlockSelection,
    scores: Floats,
    shares: npt.NDArray[np.float64],
    own: list[list[int]],
    *,
    weights: list[float],
    resident: set[int],
) -> list[list[int]]:
    """What each position executes."""
    eligible = eligible_set(policy, shares, own, weights=weights, resident=resident)
    executed = []
    for d, chosen in enumerate(own):
        best = max(chosen, key=lambda e: (scores[d][e], -chosen.index(e)))
        rescued = {best} if weights[d] >= policy.rescue else set()
        executed.append(choose(scores[d], chosen, eligible | rescued))
    return executed
