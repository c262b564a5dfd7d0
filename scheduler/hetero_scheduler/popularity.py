"""How often each expert has been used: the order in which prefill fetches ahead (SeqMoE §8.4)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

PROFILE_TOKENS = 1024
"""Tokens for which a profile stands: what a session counts itself outweighs it after as many."""


class Popularity:
    """Running token counts `[num_layers, num_experts]`."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.counts = np.zeros((num_layers, num_experts), dtype=np.float64)

    @classmethod
    def profiled(cls, uses: npt.NDArray[np.floating], *, top_k: int) -> Popularity:
        """Counts that begin with a profile: how often other text `uses` each expert, in any unit.

        Raises ValueError for a layer that the other text never passed.
        """
        total = uses.sum(axis=1, keepdims=True)
        if (total <= 0).any():
            raise ValueError(f"layer {int(total.argmin())} of the profile has no uses")
        popularity = cls(*uses.shape)
        popularity.counts += PROFILE_TOKENS * top_k * uses / total
        return popularity

    def observe(self, layer: int, tokens_per_expert: npt.NDArray[np.int64]) -> None:
        """Add the tokens that each expert of `layer` received. `tokens_per_expert`: `[num_experts]`."""
        self.counts[layer] += tokens_per_expert
