"""What a trace's routing is like: whether a hit rate measured on it means something."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hetero_scheduler.trace import Trace, count_uses


class RoutingFacts(NamedTuple):
    """Shares from 0 to 1, means over layers."""

    load_entropy: float
    """Entropy of the expert load over log E: 1 when every expert is used alike."""
    persistence: float
    """Share of a token's experts that the token before it, in the same document, used too."""
    by_chance: float
    """What persistence would be if tokens chose independently, under the same load."""

    @classmethod
    def of(cls, trace: Trace) -> RoutingFacts:
        """Facts of `trace`. Persistence is 0 when no document has two tokens."""
        is_first = np.zeros(trace.num_tokens, dtype=bool)
        is_first[trace.bounds[:-1]] = True
        again = []
        for layer in range(trace.num_layers):
            chosen = trace.topk[:, layer]  # [T, K]
            is_again = (chosen[1:, :, None] == chosen[:-1, None, :]).any(axis=-1)[~is_first[1:]]
            again.append(float(is_again.mean()) if is_again.size else 0.0)
        used = count_uses(trace.topk, trace.num_experts) / trace.num_tokens  # [L, E]
        by_chance = (used**2).sum(axis=1).mean() / trace.top_k
        return cls(trace.load_entropy(), float(np.mean(again)), float(by_chance))
