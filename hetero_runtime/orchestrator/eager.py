"""The eager orchestrator: driven by the host, layer by layer, on any device.

One layer, experts 2 5 7 9 needed, 5 resident, one spare slot:

    transfer   copy 2 ─── copy 7 (waits for 2 to be read) ─── copy 9 (waits for 5) ─── prefetch l+1 ───
    compute    ── wait ── expert 2 ── expert 5 ── wait ── expert 7 ── wait ── expert 9 ──

Experts run in ascending order, which is transformers' own: float sums then have the same order, so the output
does not depend on what happened to be resident, not even in the last bit. Within that order copies run ahead
as far as slots allow. When a prompt touches more experts than there are slots, the same loop becomes waves:
each expert executed frees the slot of one to come, and the resident expert that gives way first is the one
needed last.

Where misses may be computed in place (`in_place`), a part of them never comes to the device: the CPU begins
with it before the first load and its sum is added last, so those outputs agree up to rounding only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch

from hetero_gpu import CacheStats, SlabCache
from hetero_runtime.experts.compute import Dispatch, ExpertMlp, LayerSum, Params
from hetero_runtime.in_place import InPlaceMisses, InPlaceStats
from hetero_runtime.orchestrator.ahead import Ahead, PredictionStats
from hetero_runtime.orchestrator.base import Orchestrator, Phase
from hetero_runtime.orchestrator.prompt_ahead import PromptAhead
from hetero_runtime.tiers.governor import Governor
from hetero_scheduler import EvictionPolicy, ExpertKey, Lookup
from hetero_scheduler.eviction import keeping
from hetero_scheduler.slots import Scores


class EagerOrchestrator(Orchestrator):
    """See the module docstring.

    `mlps`: one a MoE layer. `materialize`: a record's bytes (uint8 `[record_bytes]`) to parameters.
    `prompts`: fetches what a prompt's layers to come probably need; None fetches nothing for prompts.
    `ahead`: what follows from forecasts, or from a routing policy's insertions; None where there are neither.
    `governor`: gives slabs back where memory may run short; None where nobody does.
    `in_place`: None loads every miss.
    """

    def __init__(
        self,
        cache: SlabCache,
        *,
        mlps: list[ExpertMlp],
        materialize: Callable[[torch.Tensor], Params],
        eviction: EvictionPolicy,
        prompts: PromptAhead | None,
        ahead: Ahead | None = None,
        governor: Governor | None = None,
        in_place: InPlaceMisses | None = None,
    ) -> None:
        self._cache, self._mlps, self._materialize = cache, mlps, materialize
        self.eviction, self.prompts = eviction, prompts
        self._ahead, self._governor, self._in_place = ahead, governor, in_place
        self._num_experts = eviction.score.shape[1]
        self._phase = Phase.DECODE
        self._checkpoint: Callable[[], None] = _go_on

    @contextmanager
    def pass_(self, phase: Phase, *, checkpoint: Callable[[], None]) -> Iterator[None]:
        self._phase, self._checkpoint = phase, checkpoint
        try:
            with self._beside_the_cpu():
                yield
        except BaseException:
            if self._in_place is not None:
                self._in_place.settle()
            self._cache.settle()
            raise
        finally:
            self._checkpoint = _go_on
            if self.prompts is not None:
                self.prompts.end()

    def expect_prompt(self, num_tokens: int) -> None:
        if self.prompts is not None:
            self.prompts.begin(num_tokens)

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
        if self._in_place is not None:
            self._in_place.remember(layer)
        self.eviction.observe(layer, tokens_per_expert)
        if self.prompts is not None:
            if self._phase is Phase.PREFILL and not self.prompts.has_begun:
                self.prompts.begin(len(chosen))
            self.prompts.layer_begins(layer, tokens_per_expert)
        kept = () if self._ahead is None else self._ahead.kept(layer)
        self._cache.begin_layer(layer, frozenset(needed), kept=kept)
        total = LayerSum(hidden, top_k_weights, dispatch)
        if self._in_place is None:
            self._execute(layer, range(len(needed)), needed, total)
        else:
            numbers = self._in_place.begin(needed, total)
            needed = [needed[number] for number in numbers]
            self._execute(layer, numbers, needed, total)
            self._in_place.finish(total)
        if self._ahead is not None:
            self._ahead.layer_ends(layer, needed)
        return total.total

    def device_stats(self) -> CacheStats:
        return CacheStats()

    def in_place_stats(self) -> InPlaceStats:
        return InPlaceStats() if self._in_place is None else self._in_place.stats()

    def prediction_stats(self) -> PredictionStats:
        return PredictionStats() if self._ahead is None else self._ahead.stats()

    def check(self) -> None:
        self._cache.check()

    def close(self) -> None:
        if self._in_place is not None:
            self._in_place.close()

    def _beside_the_cpu(self) -> AbstractContextManager[None]:
        return nullcontext() if self._in_place is None else self._in_place.beside_torch()

    # ---- stages of one layer

    def _execute(self, layer: int, numbers: Sequence[int], needed: list[ExpertKey], total: LayerSum) -> None:
        """Load what is missing of `needed` and add all of it up. `numbers`: its positions in the dispatch."""
        mlp = self._mlps[layer]
        num_loaded, num_released = 0, 0
        if not needed:
            self._all_submitted(layer, [])
        for i, key in enumerate(needed):
            if num_loaded < len(needed):
                self._release(needed[num_released:i])
                num_released = i
                num_loaded = self._load_ahead(needed, i, num_loaded)
                if num_loaded == len(needed):
                    self._all_submitted(layer, needed[i:])
            self._cache.wait(key)
            params = self._materialize(self._cache.slab(key))
            total.add(numbers[i], partial(mlp, params=params))
            if self._ahead is not None and num_loaded == len(needed):
                self._ahead.expert_ran()
        self._release(needed[num_released:])

    def _release(self, executed: list[ExpertKey]) -> None:
        """Their slots may go to others."""
        self._cache.release(executed)
        if self.prompts is not None:
            self.prompts.executed(executed)

    def _all_submitted(self, layer: int, running: list[ExpertKey]) -> None:
        """The link has nothing more to do for this layer. `running`: its experts that are still to run."""
        if self._ahead is not None:
            self._ahead.look_ahead(layer, running)
        if self.prompts is not None and self.prompts.has_begun:
            self.prompts.fetch()

    def _load_ahead(self, needed: list[ExpertKey], i: int, start: int) -> int:
        """Submit loads of `needed[start:]` while slots last, and in any case what `needed[i]` needs. Returns
        the first index not yet submitted."""
        score: Scores | None = None
        for j in range(start, len(needed)):
            if self._cache.lookup(needed[j]) is not Lookup.MISS:
                continue
            if score is None:
                score = keeping(self.eviction.score, needed[i:])
            if self._load(needed[j], score=score, is_urgent=j == i):
                continue
            if j > i:
                return j
            self._load_over(needed, i, score=score)
        return len(needed)

    def _load(self, key: ExpertKey, *, score: Scores, is_urgent: bool) -> bool:
        """Over what the policy, by its `score`, or the rest of a prompt needs least. False when there is no
        such slot."""
        if self.prompts is not None and self.prompts.has_begun:
            return self.prompts.load(key, is_urgent=is_urgent)
        return self._cache.load(key, score=score)

    def _load_over(self, needed: list[ExpertKey], i: int, *, score: Scores) -> None:
        """Load `needed[i]` over the resident expert of this layer that is needed last. `score`: of those that
        stay otherwise."""
        for last in range(len(needed) - 1, i, -1):
            score[needed[last]] = self.eviction.score[needed[last]]
            if self._cache.load(needed[i], score=score):
                return
        raise AssertionError(f"no slot can be freed for {needed[i]}: {self._cache.counts()}")


def _go_on() -> None:
    return
