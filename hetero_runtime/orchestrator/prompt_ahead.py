"""What a prompt fetches before its layers ask for it, and what gives way to it (SeqMoE §8.4).

    before layer 0      experts that layers probably need, the nearest layer first, the hottest expert first
    after each layer    the same of the layers to come, as far as slots last
    all the while       E slots of a pool (half of it, where that is less) are kept back for the running layer
                        and for what is missed

A prompt of many tokens uses what is popular, so frequencies that were profiled on other text say more of it
than what the cache used last.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hetero_gpu import SlabCache
from hetero_scheduler import ExpertKey, Lookup, Popularity
from hetero_scheduler.prompt_scan import PromptScan
from hetero_scheduler.slots import Scores


class PromptAhead:
    """One prompt after the other. `popularity`: profiled, and counted on from here."""

    def __init__(self, cache: SlabCache, popularity: Popularity, *, top_k: int) -> None:
        self.popularity = popularity
        self._cache, self._top_k = cache, top_k
        self._scan: PromptScan | None = None

    @property
    def has_begun(self) -> bool:
        """Whether a prompt passes through the layers."""
        return self._scan is not None

    def begin(self, num_tokens: int) -> None:
        """A prompt of `num_tokens` enters: the first transfers are submitted."""
        self._scan = PromptScan(self.popularity, num_tokens=num_tokens, top_k=self._top_k)
        self.fetch()

    def end(self) -> None:
        """The prompt is through, or given up."""
        self._scan = None

    def layer_begins(self, layer: int, tokens_per_expert: npt.NDArray[np.int64]) -> None:
        """`layer` runs now, of a prompt or not, and gives each expert that many tokens, `[num_experts]`."""
        self.popularity.observe(layer, tokens_per_expert)
        if self._scan is not None:
            self._scan.begin(layer, tokens_per_expert)

    def executed(self, keys: Sequence[ExpertKey]) -> None:
        """The running layer needs `keys` no more."""
        if self._scan is not None and keys:
            self._scan.mark_executed(np.array([key.expert for key in keys]))

    def load(self, key: ExpertKey, *, is_urgent: bool) -> bool:
        """`SlabCache.load`, over what the rest of the prompt needs least: what the running layer has not
        executed stays. Unless it `is_urgent`, so does what later layers probably need."""
        assert self._scan is not None, "no prompt has begun"
        if self._cache.load(key, score=self._scan.score):
            return True
        return is_urgent and self._cache.load(key, score=self._scan.last_resort())

    def fetch(self) -> None:
        """Prefetch for the layers to come, the nearest first. What the running layer needs stays."""
        assert self._scan is not None, "no prompt has begun"
        for layer in range(self._scan.layer + 1, len(self._scan.score)):
            if not self._fetch_layer(layer, self._scan.score):
                return

    def _fetch_layer(self, layer: int, score: Scores) -> bool:
        """Whether slots are left for the layer after it."""
        assert self._scan is not None, "no prompt has begun"
        kept_back = min(score.shape[1], self._cache.pool_size(layer) // 2)
        budget = self._cache.pool_size(layer) - self._cache.num_fetching(layer) - kept_back
        for expert in self._scan.expected(layer).tolist():
            key = ExpertKey(layer, expert)
            if self._cache.lookup(key) is not Lookup.MISS:
                continue
            if budget <= 0 or not self._cache.prefetch(key, score=score):
                return False
            budget -= 1
        return True
