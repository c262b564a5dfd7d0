"""What a prompt's pass through the layers still needs: a guess for prefetching, a score for eviction.

A prompt runs layer 0, 1, 2, ... once. Recency would throw away exactly what comes next; but what a slot is
still worth to the pass is known nearly as well as to Belady, so the pass has a score of its own:

    score      expert                                                        leaves
    0 + t      of a layer that was executed, or not needed by the running    first; fewest tokens first
    1 + t      of the running layer, executed                                then
    2 + t      the same, and the running layer needs it again                then
    3 + p      of a layer to come, probably not needed                       last
    infinity   awaited by the running layer, or probably needed by a later   only by `last_resort`

t: the expert's share of the prompt's tokens. p: the probability that the prompt uses it, by popularity or,
where a predictor has spoken of its layer, by its forecast.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hetero_scheduler.popularity import Popularity
from hetero_scheduler.slots import Scores

_LIKELY = 0.5
"""From this probability on an expert is kept, and fetched ahead: more often than not it is needed."""
_LIKELY_BLIND = 0.9
"""To be fetched ahead in a layer of which nothing is known, where any expert is as good a guess."""


def probability_of_use(popularity: Popularity, *, num_tokens: int, top_k: int) -> Scores:
    """That any of `num_tokens` tokens uses an expert: 1 - (1 - q)^T, `[num_layers, num_experts]`.

    q, for one token: top_k times the expert's share of its layer's counts, each expert counted once more
    than it was seen, so that a layer without history is uniform.
    """
    seen = popularity.counts + 1.0
    one_token = np.minimum(1.0, top_k * seen / seen.sum(axis=1, keepdims=True))
    probability: Scores = 1.0 - (1.0 - one_token) ** num_tokens
    return probability


class PromptScan:
    """One pass of `num_tokens` tokens; see the module docstring. `score`: `[num_layers, num_experts]`."""

    def __init__(self, popularity: Popularity, *, num_tokens: int, top_k: int) -> None:
        self._p = probability_of_use(popularity, num_tokens=num_tokens, top_k=top_k)
        is_known = popularity.counts.any(axis=1, keepdims=True)
        self._is_worth_fetching = self._p >= np.where(is_known, _LIKELY, _LIKELY_BLIND)
        self._hottest_first = np.argsort(-popularity.counts, axis=1, kind="stable")
        self._num_tokens, self._top_k = num_tokens, top_k
        self._share = np.zeros(self._p.shape[1])
        self._num_used, self._executed = 0, 1.0
        self.layer = -1
        """The one that runs; -1 before the first."""
        self.score: Scores = np.where(self._p < _LIKELY, 3.0 + self._p, np.inf)

    def begin(self, layer: int, tokens_per_expert: npt.NDArray[np.int64], *, is_last: bool = True) -> None:
        """`layer` runs now and gives each expert that many tokens, `[num_experts]`; unless `is_last`, it
        begins once more with further ones."""
        if layer != self.layer:
            if self.layer >= 0:
                self.score[self.layer] = self._share
            self._share = np.zeros(len(tokens_per_expert))
        self.layer, self._executed = layer, 1.0 if is_last else 2.0
        self._num_used = int(np.count_nonzero(tokens_per_expert))
        self._share = self._share + tokens_per_expert / (self._num_tokens + 1)
        self.score[layer] = np.where(tokens_per_expert > 0, np.inf, 0.0)

    def mark_executed(self, experts: npt.NDArray[np.int64]) -> None:
        """The running layer has executed `experts`; their slots may go to others."""
        self.score[self.layer, experts] = self._executed + self._share[experts]

    def foresee(self, layers: Sequence[int], probabilities: Scores) -> None:
        """A predictor has spoken of `layers` that come after the running one: from now on it says which
        experts they use and in which order, not popularity. `probabilities` `[len(layers), num_experts]`,
        each row adding up to 1 at most."""
        to_come = list(layers)
        num_tokens = self._share.sum() * (self._num_tokens + 1) / self._top_k  # some may have been dropped
        p = 1.0 - (1.0 - np.minimum(1.0, self._top_k * probabilities)) ** num_tokens
        self._p[to_come], self._is_worth_fetching[to_come] = p, p >= _LIKELY
        self._hottest_first[to_come] = np.argsort(-probabilities, axis=1, kind="stable")
        self.score[to_come] = np.where(p < _LIKELY, 3.0 + p, np.inf)

    def expected(self, layer: int) -> npt.NDArray[np.int64]:
        """Experts of a later `layer` that this prompt probably uses, hottest first: no more of them than
        the running layer uses, once one runs."""
        ranking = self._hottest_first[layer]
        likely: npt.NDArray[np.int64] = ranking[self._is_worth_fetching[layer, ranking]]
        return likely if self.layer < 0 else likely[: self._num_used]

    def last_resort(self) -> Scores:
        """`score`, but layers to come give way too: the least probable expert, of those alike the one whose
        layer is farthest."""
        layers = np.arange(len(self._p))[:, None]
        score: Scores = np.where(
            layers > self.layer, 3.0 + self._p - 1e-3 * layers / len(self._p), self.score
        )
        return score
