"""A recorded routing: what the routers of a model said, token by token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Trace:
    """`T` tokens through `L` MoE layers of `E` experts, top-`K`, in documents laid end to end.

    `logits` float16 `[T, L, E]`: router logits before any normalisation. `topk` integers `[T, L, K]`: the
    experts that the router chose. `tokens` int32 `[T]`. `bounds` int64 `[D + 1]`: document d holds the tokens
    `bounds[d]:bounds[d + 1]`; nothing is remembered from one document to the next.
    """

    logits: npt.NDArray[np.float16]
    topk: npt.NDArray[np.integer]
    tokens: npt.NDArray[np.int32]
    bounds: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        """Raise ValueError when the parts do not fit together."""
        num_tokens, num_layers, num_experts = self.logits.shape
        if self.topk.shape[:2] != (num_tokens, num_layers) or self.tokens.shape != (num_tokens,):
            raise ValueError(
                f"logits {self.logits.shape}, topk {self.topk.shape} and tokens {self.tokens.shape} disagree"
            )
        if num_tokens and not 0 <= int(self.topk.min()) <= int(self.topk.max()) < num_experts:
            raise ValueError(f"topk names an expert outside 0 to {num_experts - 1}")
        if self.bounds[0] != 0 or self.bounds[-1] != num_tokens or (np.diff(self.bounds) <= 0).any():
            raise ValueError(f"bounds {self.bounds.tolist()[:6]} do not divide {num_tokens} tokens")

    @property
    def num_tokens(self) -> int:
        """T"""
        return int(self.logits.shape[0])

    @property
    def num_layers(self) -> int:
        """L"""
        return int(self.logits.shape[1])

    @property
    def num_experts(self) -> int:
        """E"""
        return int(self.logits.shape[2])

    @property
    def top_k(self) -> int:
        """K"""
        return int(self.topk.shape[2])

    def load_entropy(self) -> float:
        """Entropy of the experts' load over log E, mean over layers: 1 is a perfectly even load."""
        entropies = []
        for layer in range(self.num_layers):
            counts = np.bincount(self.topk[:, layer].reshape(-1), minlength=self.num_experts)
            share = counts[counts > 0] / counts.sum()
            entropies.append(float(-(share * np.log(share)).sum() / np.log(self.num_experts)))
        return float(np.mean(entropies))
