"""The eager orchestrator: driven by the host, layer by layer, on any device.

One layer, experts 2 5 7 9 needed, 5 resident, one spare slot:

    transfer   copy 2 ─── copy 7 (waits for 2 to be read) ─── copy 9 (waits for 5) ─── prefetch l+1 ───
    compute    ── wait ── expert 2 ── expert 5 ── wait ── expert 7 ── wait ── expert 9 ──

Experts run in ascending order, which is transformers' own: float sums then have the same order, so the output
does not depend on what happened to be resident, not even in the last bit. Within that order copies run ahead
as far as slots allow. When a prompt touches more experts than there are slots, the same loop becomes waves:
each expert executed frees the slot of one to come, and the resident expert that gives way first is the one
needed last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from hetero_gpu import CacheStats, SlabCache
from hetero_runtime.experts.compute import Dispatch, ExpertMlp, LayerSum, Params
from hetero_runtime.orchestrator.ahead import Ahead
from hetero_runtime.orchestrator.base import Orchestrator, Phase
from hetero_runtime.tiers.governor import Governor
from hetero_scheduler import EvictionPolicy, ExpertKey, Lookup, Popularity


class EagerOrchestrator(Orchestrator):
    """See the module docstring.

    `mlps`: one a MoE layer. `materialize`: a record's bytes (uint8 `[record_bytes]`) to parameters.
    `is_fetching_ahead`: whether prefill fetches popular experts of the next layer (SeqMoE §8.4). `ahead`:
    what follows from forecasts, or from a routing policy's insertions; None where there are neither.
    `governor`: gives slabs back where memory may run short; None where nobody does.
    """

    def __init__(
        self,
        cache: SlabCache,
        *,
        mlps: list[ExpertMlp],
        materialize: Callable[[torch.Tensor], Params],
        eviction: EvictionPolicy,
        is_fetching_ahead: bool,
        ahead: Ahead | None = None,
        governor: Governor | None = None,
    ) -> None:
        self._cache, self._mlps, self._materialize = cache, mlps, materialize
        self.eviction, self.is_fetching_ahead = eviction, is_fetching_ahead
        self._ahead, self._governor = ahead, governor
        self._num_layers, self._num_experts = eviction.score.shape
        self._popularity = Popularity(self._num_layers, self._num_experts)
        self._phase = Phase.DECODE
        self._checkpoint: Callable[[], None] = _go_on

    @contextmanager
    def pass_(self, phase: Phase, *, checkpoint: Callable[[], None]) -> Iterator[None]:
        self._phase, self._checkpoint = phase, checkpoint
        try:
            yield
        except BaseException:
            self._cache.settle()
            raise
        finally:
            self._checkpoint = _go_on

    def run_layer(
        self, layer: int, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        self._checkpoint()
        if self._governor is not None:
            self._governor.look()
        chosen = top_k_index.cpu().numpy()
        if self._ahead is not None:
            self._ahead.layer_begins(chosen)
        dispatch = Dispatch.of(chosen)
        needed = [ExpertKey(layer, expert) for expert in dispatch.experts.tolist()]
        tokens_per_expert = dispatch.tokens_per_expert(self._num_experts)
        self.eviction.observe(layer, tokens_per_expert)
        self._popularity.observe(layer, tokens_per_expert)
        kept = () if self._ahead is None else self._ahead.kept(layer)
        self._cache.begin_layer(layer, frozenset(needed), kept=kept)
        total = LayerSum(hidden, top_k_weights, dispatch)
        self._execute(layer, needed, total)
        if self._ahead is not None:
            self._ahead.layer_ends(layer, needed)
        return total.total

    def device_stats(self) -> CacheStats:
        return CacheStats()

    def check(self) -> None:
        self._cache.check()

    # ---- stages of one layer

    def _execute(self, layer: int, needed: list[ExpertKey], total: LayerSum) -> None:
        mlp = self._mlps[layer]
        num_loaded, num_released = 0, 0
        for i, key in enumerate(needed):
            if num_loaded < len(needed):
                self._cache.release(needed[num_released:i])
                num_released = i
                num_loaded = self._load_ahead(needed, i, num_loaded)
                if num_loaded == len(needed):
                    if self._ahead is not None:
                        self._ahead.look_ahead(layer, needed[i:])
                    self._fetch_ahead(layer + 1, protected=needed[i:])
            self._cache.wait(key)
            params = self._materialize(self._cache.slab(key))
            total.add(i, partial(mlp, params=params))
        self._cache.release(needed[num_released:])

    def _load_ahead(self, needed: list[ExpertKey], i: int, start: int) -> int:
        """Submit loads of `needed[start:]` while slots last, and in any case what `needed[i]` needs. Returns
        the first index not yet submitted."""
        for j in range(start, len(needed)):
            if self._cache.lookup(needed[j]) is not Lookup.MISS:
                continue
            if self._cache.load(needed[j], protected=needed[i:]):
                continue
            if j > i:
                return j
            self._load_over(needed, i)
        return len(needed)

    def _load_over(self, needed: list[ExpertKey], i: int) -> None:
        """Load `needed[i]` over the resident expert of this layer that is needed last."""
        for last in range(len(needed) - 1, i, -1):
            if self._cache.load(needed[i], protected=needed[i:last]):
                return
        raise AssertionError(f"no slot can be freed for {needed[i]}: {self._cache.counts()}")

    def _fetch_ahead(self, layer: int, *, protected: list[ExpertKey]) -> None:
        """Prefill only: prefetch experts of `layer`, the most popular first. E slots (half of the pool, where
        that is less) are kept back for what it turns out to need besides."""
        if self._phase is not Phase.PREFILL or not self.is_fetching_ahead or layer >= self._num_layers:
            return
        kept_back = min(self._num_experts, self._cache.pool_size(layer) // 2)
        budget = self._cache.num_available(layer) - len(protected) - kept_back
        counts = self._popularity.counts[layer]
        for expert in self._popularity.ranking(layer)[: max(0, budget)].tolist():
            if not counts[expert]:
                return
            key = ExpertKey(layer, expert)
            if self._cache.lookup(key) is Lookup.MISS and not self._cache.prefetch(key, protected=protected):
                return


def _go_on() -> None:
    return
