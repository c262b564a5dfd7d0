"""A recorded routing: what the routers of a model said, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Trace:
    """`T` tokens through `L` MoE layers of `E` experts, top-`K`, in documents laid end to end.

    `logits` float16 `[T, L, E]`: router logits before any normalisation. `topk` integers `[T, L, K]`: the
    experts that the router chose. `tokens` int32 `[T]`. `bounds` int64 `[D + 1]`: document d holds the tokens
    `bounds[d]:bounds[d + 1]`; nothing is remembered from one document to the next. `early` float16
    `[T, L, E]`, where it was recorded: what the router of each layer says to the input of the layer before
    it; zeros for layer 0.
    """

    logits: npt.NDArray[np.float16]
    topk: npt.NDArray[np.integer]
    tokens: npt.NDArray[np.int32]
    bounds: npt.NDArray[np.int64]
    early: npt.NDArray[np.float16] | None = None

    def __post_init__(self) -> None:
        """Raise ValueError when the parts do not fit together."""
        num_tokens, num_layers, num_experts = self.logits.shape
        if self.topk.shape[:2] != (num_tokens, num_layers) or self.tokens.shape != (num_tokens,):
            raise ValueError(
                f"logits {self.logits.shape}, topk {self.topk.shape} and tokens {self.tokens.shape} disagree"
            )
        if self.early is not None and self.early.shape != self.logits.shape:
            raise ValueError(f"early {self.early.shape} and logits {self.logits.shape} disagree")
        if num_tokens and not 0 <= int(self.topk.min()) <= int(self.topk.max()) < num_experts:
            raise ValueError(f"topk names an expert outside 0 to {num_experts - 1}")
        if self.bounds[0] != 0 or self.bounds[-1] != num_tokens or (np.diff(self.bounds) <= 0).any():
            raise ValueError(f"bounds {self.bounds.tolist()[:6]} do not divide {num_tokens} tokens")

    @classmethod
    def joined(cls, traces: Sequence[Trace]) -> Trace:
        """The documents of all `traces`, in order. `early` is kept where all of them have it."""
        early = [trace.early for trace in traces if trace.early is not None]
        ends = np.cumsum([0, *(trace.num_tokens for trace in traces)], dtype=np.int64)
        bounds = [trace.bounds[1:] + end for trace, end in zip(traces, ends, strict=False)]
        return cls(
            logits=np.concatenate([trace.logits for trace in traces]),
            topk=np.concatenate([trace.topk for trace in traces]),
            tokens=np.concatenate([trace.tokens for trace in traces]),
            bounds=np.concatenate([ends[:1], *bounds]),
            early=np.concatenate(early) if len(early) == len(traces) else None,
        )

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
        return float(load_entropies(count_uses(self.topk, self.num_experts)).mean())


def count_uses(topk: npt.NDArray[np.integer], num_experts: int) -> npt.NDArray[np.float64]:
    """The experts' load: how often each was chosen. `[tokens, layers, top_k]` to `[layers, E]`"""
    rows = [np.bincount(topk[:, layer].reshape(-1), minlength=num_experts) for layer in range(topk.shape[1])]
    return np.array(rows, dtype=np.float64)


def load_entropies(load: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Entropy of each layer's load over log E, 0 where nothing was used. `[layers, E]` to `[layers]`"""
    share = load / np.maximum(load.sum(axis=1, keepdims=True), 1)
    logs = np.log(share, out=np.zeros_like(share), where=share > 0)
    entropies: npt.NDArray[np.float64] = -(share * logs).sum(axis=1) / np.log(load.shape[1])
    return entropies
