"""How often each expert has been used: the order in which prefill fetches ahead (SeqMoE §8.4)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class Popularity:
    """Running token counts `[num_layers, num_experts]`; ties rank the lower expert first."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.counts = np.zeros((num_layers, num_experts), dtype=np.float64)

    def observe(self, layer: int, tokens_per_expert: npt.NDArray[np.int64]) -> None:
        """Add the tokens that each expert of `layer` received. `tokens_per_expert`: `[num_experts]`."""
        self.counts[layer] += tokens_per_expert

    def ranking(self, layer: int) -> npt.NDArray[np.int64]:
        """Experts of `layer`, most used first. `[num_experts]`"""
        return np.argsort(-self.counts[layer], kind="stable")
