"""What a routing policy costs the host for one token and layer, beside which copies and kernels wait.

256 experts, top-8, prefetch-steered, as the engine calls it: steer, then select. Decisions are compared with
the plain ones first.

    python -m bench.routing_step
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bench.harness import ResultFile, Row, measure
from hetero_scheduler.routing import LogicalCache, Shape, make_routing_policy, uncalibrated
from hetero_scheduler.routing.reference import LayerReference

DEVICE = "cpu"

SHAPE, CAPACITY = Shape(2, 256, 8), 64
POLICY = make_routing_policy("psr", bonus=0.2, insertions=1, window=2)
TOKENS, LAYER = 512, 1
MOST_US = 15


class Said(NamedTuple):
    """What routers say of `TOKENS` tokens: scores and guesses float32 `[T, 1, E]`, own int64 `[T, 1, K]`."""

    scores: npt.NDArray[np.float32]
    guesses: npt.NDArray[np.float32]
    own: npt.NDArray[np.int64]


def main() -> None:
    cache = LogicalCache(POLICY, SHAPE, capacity=CAPACITY, calibration=uncalibrated(SHAPE))
    said = routers_say(np.random.default_rng(0))
    compare(cache, said)
    replay = measure(lambda: decide(cache, said), num_runs=20, num_warmups=3)
    row = Row(
        id="psr.policy_us_host",
        value=1e6 * replay.median / TOKENS,
        unit="us",
        target=f"<={MOST_US}",
        note=f"steer and select, {SHAPE.num_experts} experts, top-{SHAPE.top_k}, {CAPACITY} in the cache",
    )
    ResultFile.write("routing_step", [row])


def routers_say(rng: np.random.Generator) -> Said:
    """Neighbouring tokens are alike, and a guess is near what the router says."""
    size = (TOKENS, 1, SHAPE.num_experts)
    scores = 0.3 * np.cumsum(rng.standard_normal(size), axis=0) + rng.standard_normal(size)
    guesses = scores + 0.5 * rng.standard_normal(size)
    own = np.argsort(-scores, axis=-1, kind="stable")[..., : SHAPE.top_k]
    return Said(scores.astype(np.float32), guesses.astype(np.float32), np.ascontiguousarray(own))


def decide(cache: LogicalCache, said: Said) -> list[npt.NDArray[np.int64]]:
    """All tokens, one after the other, from the warm set on: the experts of each."""
    cache.reset()
    token, experts = np.zeros(1, np.int64), []
    for t in range(TOKENS):
        cache.steer(LAYER, said.guesses[t, 0], 0)
        decided = cache.select(said.scores[t : t + 1], said.own[t : t + 1], token, first_layer=LAYER)
        experts.append(decided.experts[0, 0])
    return experts


def compare(cache: LogicalCache, said: Said) -> None:
    """Raise AssertionError where a decision is not the plain one."""
    plain = LayerReference(POLICY, SHAPE, LAYER, capacity=CAPACITY, calibration=uncalibrated(SHAPE))
    for t, experts in enumerate(decide(cache, said)):
        expected = plain.step(said.scores[t, 0], said.own[t, 0].tolist(), said.guesses[t, 0], 0)
        assert sorted(experts.tolist()) == expected, f"token {t}: {sorted(experts.tolist())} != {expected}"


if __name__ == "__main__":
    main()
