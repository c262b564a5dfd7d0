"""What a forecast gains when more is known: the token just sampled, then the next layer's own router.

    history  ─ Mamba2 ─► p                          a step ahead
    token    ─►  p' ∝ p^scale · exp(head · u(token) + bias)      as soon as the token is sampled
    next layer's router, asked early ─► q ─►  p'' ∝ p'^a · q^b       one layer ahead

Both are log-linear pools, so what one source is sure of outweighs what another only guesses, by weights that
were learned on the model's own routing. `u` is an embedding of few numbers a token; a token that training
never met has none and leaves the forecast as it was, but for `scale` and `bias`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Shares = npt.NDArray[np.float32]
SMALLEST = np.float32(1e-6)
"""A share is taken for at least this much before its logarithm."""


@dataclass(frozen=True)
class Refinement:
    """Weights, of a model with L layers of E experts.

    `scale` `[L]`, `embedding` `[tokens, rank]`, `head` `[L, E, rank]`, `bias` `[L, E]`. `pool` `[L, 2]`: a
    and b of each layer; None where the next router was not recorded. All float32.
    """

    scale: Shares
    embedding: Shares
    head: Shares
    bias: Shares
    pool: Shares | None = None

    def __post_init__(self) -> None:
        """Raise ValueError when the parts do not fit together."""
        num_layers, num_experts, rank = self.head.shape
        fits = (
            self.scale.shape == (num_layers,)
            and self.bias.shape == (num_layers, num_experts)
            and self.embedding.ndim == 2
            and self.embedding.shape[1] == rank
            and (self.pool is None or self.pool.shape == (num_layers, 2))
        )
        if not fits:
            shapes = {name: getattr(part, "shape", None) for name, part in vars(self).items()}
            raise ValueError(f"the parts of a refinement do not fit together: {shapes}")

    def with_tokens(self, shares: Shares, tokens: npt.NDArray[np.integer]) -> Shares:
        """Forecasts for the steps of `tokens` `[...]`, now that these are known. `shares` `[..., L, E]`"""
        known = tokens < len(self.embedding)
        embedded = np.where(known[..., None], self.embedding[np.where(known, tokens, 0)], np.float32(0))
        learned = np.einsum("...r,ler->...le", embedded, self.head, optimize=True)
        return _normalised(self.scale[:, None] * _logs(shares) + learned + self.bias)

    def with_next_router(self, shares: Shares, logits: npt.NDArray[np.floating], layers: slice) -> Shares:
        """Forecasts of `layers`, now that their routers were asked early. `shares`, `logits` `[..., n, E]`.

        Raises ValueError for a refinement without `pool`.
        """
        if self.pool is None:
            raise ValueError("this refinement has learned nothing of routers that are asked early")
        pool = self.pool[layers]
        early = _logs(_normalised(logits.astype(np.float32)))
        return _normalised(pool[:, :1] * _logs(shares) + pool[:, 1:] * early)


def _logs(shares: Shares) -> Shares:
    logs: Shares = np.log(np.maximum(shares, SMALLEST))
    return logs


def _normalised(logits: Shares) -> Shares:
    """Softmax over experts."""
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    shares: Shares = weights / weights.sum(axis=-1, keepdims=True)
    return shares
