"""One set of experts for all tokens of a draft (PSR §7 and appendix B, after AcceptMoE, Liang et al., 2026).

    position   0 (root)    1        2        3            0 is committed for certain, the others are drafts
    weight       1        0.9      0.7      0.2           how likely they are to be committed
                 │         │        │        │
    eligible  its own K  ─┴─ what the others want most ─┴─, fewer the more they agree; absent ones that are
                          little wanted are left out. Every position then chooses inside the set.

What a draft executes depends on the whole draft, so the text depends on the drafter and on k. It stays a
function of the tokens, the drafts and the policy: the pool that decides what is absent is a set of numbers
that follows recency, no memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from hetero_scheduler.routing.base import Shape
from hetero_scheduler.routing.block_step import count_absent, count_foreign, select_block, use

Floats = npt.NDArray[np.float32]
Experts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BlockSelection:
    """Raises ValueError for values that mean nothing."""

    name: ClassVar[str] = "block_selection"
    growth: float = 1.05
    """Gamma: experts beyond the root's own, in effective ones (e to the entropy) of what the drafts want."""
    rerouting: float = 0.05
    """Share of the demand of all positions that leaving out absent experts may take away. The paper names
    AcceptMoE's budget without its value; this is ours. 0: none is left out."""
    rescue: float = 0.3
    """Positions of that weight and more keep their own best expert, in the set or not. Above 1: none does."""

    def __post_init__(self) -> None:
        for field, least in (("growth", 0.0), ("rerouting", 0.0), ("rescue", 0.0)):
            value = getattr(self, field)
            if not least <= value < float("inf"):
                raise ValueError(f"{field} is {value}; give a finite number of {least:g} or more")


class BlockDecisions(NamedTuple):
    """Of one layer and one block of `n` positions."""

    experts: Experts
    """To execute: the router's own choices that are kept in their order, then the others from the best on.
    `[n, top_k]`"""
    demanded: int
    """Experts executed that were not in the pool."""
    deviating: int
    """Experts executed that the router would not have chosen, over all positions."""


class BlockPool:
    """`policy` on one text of a model of `shape`: which `capacity` experts of each layer ran last.

    Order for a layer: `read` for a prompt, `select` for a block, once for each block. Not thread-safe. Raises
    ValueError for a capacity that no layer can run with.
    """

    def __init__(self, policy: BlockSelection, shape: Shape, *, capacity: int) -> None:
        num_layers, num_experts, top_k = shape
        if not top_k <= capacity <= num_experts:
            raise ValueError(
                f"capacity is {capacity}; give {top_k} (the top-k) to {num_experts} (all experts)"
            )
        self._policy, self._capacity = policy, capacity
        self._last_use = np.zeros((num_layers, num_experts), np.int64)
        self._clock = np.zeros(num_layers, np.int64)

    def residents(self, layer: int) -> npt.NDArray[np.bool_]:
        """Of each expert of `layer`, whether it is in the pool: used at all, and among the `capacity` that
        were used last, ties to the lowest index. `[E]`"""
        last_use = self._last_use[layer]
        kept = np.argsort(-last_use, kind="stable")[: self._capacity]
        is_resident = np.zeros(last_use.size, np.bool_)
        is_resident[kept[last_use[kept] > 0]] = True
        return is_resident

    def read(self, layer: int, experts: Experts) -> None:
        """`layer` executed `experts` `[T, top_k]` for the tokens of a prompt, in their order."""
        use(experts, self._clock[layer], self._last_use[layer])
        self._clock[layer] += len(experts)

    def select(
        self, layer: int, scores: Floats, own: Experts, weights: npt.NDArray[np.float64]
    ) -> BlockDecisions:
        """Decide a block of `n` positions, the root first.

        `scores` `[n, E]`: what the router takes its top-k of, -inf where it excludes an expert. `own`
        `[n, top_k]`: what it takes. `weights` `[n]`: of the positions; the root's is 1.
        """
        resident = self.residents(layer)
        experts, policy = np.empty_like(own), self._policy
        limits = (float(policy.growth), float(policy.rerouting), float(policy.rescue))
        select_block(limits, scores, shares_of(scores), own, weights, resident, experts)
        self.read(layer, experts)
        return BlockDecisions(experts, count_absent(experts, resident), count_foreign(experts, own))


def shares_of(scores: Floats) -> npt.NDArray[np.float64]:
    """The softmax of `scores`, `[n, E]`."""
    raised = np.exp(scores.astype(np.float64) - scores.max(axis=1, keepdims=True))
    shares: npt.NDArray[np.float64] = raised / raised.sum(axis=1, keepdims=True)
    return shares
