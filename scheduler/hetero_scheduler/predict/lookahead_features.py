"""What the lookahead predictor sees at a layer, and what it learns to say (VisMMOE §3.3.1, §3.3.2).

    pass       one run of the model: a prompt of T tokens, or one token
    share      of a layer's T tokens, those that chose expert e; a token's top-k in a pass of one  [L, E]
    history    shares of earlier passes, fading; brought up to date layer by layer                [L, E]

At layer l:   x_l = [ history[l .. l+W] ; mean hidden state at l ; mean visual embedding ]
Target:       g[d, e] = γ^(d-1) · share[l+d, e],   1 <= d <= W

Eq. 9 asks whether expert e is active at layer l+d; each of our entries is one layer's expert, so its maximum
over d is over one term. With one token the share is that indicator. In a prompt nearly every expert is active
somewhere; there the share gives the order that the paper wants of prefill: what most tokens need comes first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hetero_scheduler.prefetch.top_b import DECAY, WINDOW

FADING = 0.5
"""Weight of the newest pass in the history."""
STRIDE = 2
"""Layers from one forecast to the next where the device's pace counts: each reaches W layers far."""
Shares = npt.NDArray[np.float32]


class LookaheadShape(NamedTuple):
    """Sizes of a model, and of the window that is predicted. `visual_size`: 0 without the visual feature."""

    num_layers: int
    num_experts: int
    top_k: int
    hidden_size: int
    visual_size: int
    window: int = WINDOW
    decay: float = DECAY

    @property
    def num_speaking(self) -> int:
        """Layers that are followed by another, each with a predictor."""
        return self.num_layers - 1

    @property
    def history_size(self) -> int:
        """Entries of the history that one layer sees."""
        return (self.window + 1) * self.num_experts

    def decays(self) -> Shares:
        """γ^(d-1) for d = 1..W. `[W]`"""
        return (self.decay ** np.arange(self.window)).astype(np.float32)


def shares_of(chosen: npt.NDArray[np.integer], num_experts: int) -> Shares:
    """Share of the tokens that chose each expert. `[tokens, top_k]` to `[num_experts]`"""
    counts = np.bincount(chosen.reshape(-1), minlength=num_experts)
    return (counts / len(chosen)).astype(np.float32)


def faded(history: Shares, share: Shares) -> Shares:
    """`history` after a run in which experts had these shares."""
    return history + np.float32(FADING) * (share - history)


@dataclass(frozen=True)
class Passes:
    """Passes to learn from, N of them, from D documents.

    `history` float16 `[N, L, E]`: before the pass. `share` float16 `[N, L, E]`: of the pass. `hidden` float16
    `[N, L, H]`: mean input of each router. `visual` float16 `[D, V]`: mean visual embedding of the document's
    images, zeros without any; V may be 0. `document` int64 `[N]`. `num_tokens` int64 `[N]`: of the pass.
    """

    history: npt.NDArray[np.float16]
    share: npt.NDArray[np.float16]
    hidden: npt.NDArray[np.float16]
    visual: npt.NDArray[np.float16]
    document: npt.NDArray[np.int64]
    num_tokens: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        """Raise ValueError where the parts do not fit together."""
        num_passes, num_layers, _ = self.history.shape
        if self.share.shape != self.history.shape or self.hidden.shape[:2] != (num_passes, num_layers):
            raise ValueError(
                f"history {self.history.shape}, share {self.share.shape} and hidden {self.hidden.shape} "
                "disagree"
            )
        if not len(self.document) == len(self.num_tokens) == num_passes:
            raise ValueError(f"{len(self.document)} and {len(self.num_tokens)} numbers, {num_passes} passes")

    def __len__(self) -> int:
        """Number of passes."""
        return len(self.document)

    @property
    def is_prompt(self) -> npt.NDArray[np.bool_]:
        """Whether a pass has several tokens. `[N]`"""
        return self.num_tokens > 1

    def shape(self, top_k: int) -> LookaheadShape:
        """Sizes of a predictor for these passes."""
        _, num_layers, num_experts = self.share.shape
        return LookaheadShape(
            num_layers, num_experts, top_k, int(self.hidden.shape[2]), int(self.visual.shape[1])
        )

    def take(self, numbers: npt.NDArray[Any]) -> Passes:
        """The passes with these numbers, or where a mask is set."""
        return Passes(
            self.history[numbers],
            self.share[numbers],
            self.hidden[numbers],
            self.visual,
            self.document[numbers],
            self.num_tokens[numbers],
        )

    def without_visual(self) -> Passes:
        """The same passes, of which nobody knows what was seen."""
        return Passes(
            self.history, self.share, self.hidden, self.visual[:, :0], self.document, self.num_tokens
        )


def seen_at_layers(passes: Passes, window: int) -> Shares:
    """What each speaking layer sees of the history: its own run and what is kept of the W that follow.
    `[N, L - 1, (W + 1) · E]`; beyond the last layer zeros."""
    num_passes, num_layers, num_experts = passes.share.shape
    before = passes.history.astype(np.float32)
    after = faded(before, passes.share.astype(np.float32))
    seen = np.zeros((num_passes, num_layers - 1, window + 1, num_experts), dtype=np.float32)
    for layer in range(num_layers - 1):
        seen[:, layer, 0] = after[:, layer]
        following = before[:, layer + 1 : layer + 1 + window]
        seen[:, layer, 1 : 1 + following.shape[1]] = following
    return seen.reshape(num_passes, num_layers - 1, -1)


def shares_ahead(passes: Passes, window: int) -> Shares:
    """Shares of the W layers that follow each speaking layer; beyond the last layer NaN.
    `[N, L - 1, W, E]`"""
    num_passes, num_layers, num_experts = passes.share.shape
    ahead = np.full((num_passes, num_layers - 1, window, num_experts), np.nan, dtype=np.float32)
    for layer in range(num_layers - 1):
        following = passes.share[:, layer + 1 : layer + 1 + window]
        ahead[:, layer, : following.shape[1]] = following
    return ahead
