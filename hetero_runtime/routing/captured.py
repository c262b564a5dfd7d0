"""The routing policy inside the captured step: prompts decided by the host, single tokens on the device.

    prompt   Routing.choose, layer by layer ─► the row's logical cache ─► adopted by its row on the device
    step     router, next router ─ decide, follow ─► experts run         all rows at once
                                      └─► keys of what is inserted for the next layer, for `captured_prefetch`

Both sides decide alike, bit for bit, so where a token is decided changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hetero_gpu.routing import DeviceCaches, Following, Said, decide
from hetero_runtime.hf.router_choice import RouterScores, SteerableRouter, let_choose
from hetero_runtime.hf.visual import Images
from hetero_runtime.routing.eviction import HELD
from hetero_runtime.routing.routing import Routing, RoutingStats, TextPart


class CapturedRouting:
    """`active` bool `[rows]`, on the device: whose token counts in a step. `score` float64 `[L, E]`, on the
    device: eviction scores that follow the logical caches; None where eviction has a mind of its own.

    Also a LookAhead of `captured_prefetch`: what has been inserted for the next layer.
    """

    def __init__(
        self, routing: Routing, *, active: torch.Tensor, vocab_size: int, score: torch.Tensor | None = None
    ) -> None:
        self._routing, self._active, self._score = routing, active, score
        self._caches = DeviceCaches(
            routing.new_cache(), rows=len(active), vocab_size=vocab_size, device=active.device
        )
        self._tokens = torch.zeros(len(active), dtype=torch.long, device=active.device)
        self._is_prompt = False
        self._inserted: torch.Tensor | None = None

    def attach(
        self, model: Any, tokens: torch.Tensor, *, routers: Sequence[SteerableRouter] | None = None
    ) -> None:
        """Decide for the routers of `model` from now on. `tokens` int64 `[rows]`, on the device: what steps
        read, at an address that stays. `routers`: as for `let_choose`."""
        self._tokens = tokens
        self._routing.on_device = self.stats
        let_choose(model, self.choose, looks_ahead=self._routing.policy.looks_ahead, routers=routers)

    # ---- prompts

    @contextmanager
    def read(
        self, row: int, ids: torch.Tensor, *, is_first: bool, images: Images | None = None
    ) -> Iterator[None]:
        """Around a pass over the prompt `ids` `[n]` in `row`. `is_first`: whether its text begins with it."""
        cache = self._routing.new_cache()
        if not is_first:
            self._caches.to_host(row, cache)
        with self._routing.pass_of([TextPart(cache, ids.cpu().numpy())]):
            self._is_prompt = True
            try:
                yield
            finally:
                self._is_prompt = False
        self._caches.adopt(row, cache)

    def end(self, row: int) -> None:
        """The cache of `row` stays until the next text begins there."""

    # ---- routers, and what is captured

    def choose(self, layer: int, said: RouterScores, guess: torch.Tensor | None) -> torch.Tensor:
        """A Chooser. In a step: device work alone."""
        if self._is_prompt:
            return self._routing.choose(layer, said, guess)
        rows, heard = len(said.own), Said(said.scores.contiguous(), said.own.contiguous())
        if guess is not None:
            heard = heard._replace(guess=guess.contiguous())
        tokens, active = self._tokens[:rows], self._active[:rows]
        following = None if self._score is None else Following(self._score, HELD)
        experts, self._inserted = decide(
            self._caches, layer, heard, tokens=tokens, active=active, following=following
        )
        return experts

    def __call__(self, layer: int, hidden: torch.Tensor) -> torch.Tensor | None:
        """Keys of what was inserted for the layer after `layer`, as a LookAhead gives them."""
        if self._inserted is None or not self._inserted.numel():
            return None
        return self._inserted.flatten()

    def stats(self) -> RoutingStats:
        """What steps decided since the engine was loaded. Waits for the device."""
        inserted, demanded, deviating = self._caches.counters.sum(dim=(0, 1)).tolist()
        return RoutingStats(inserted, demanded, deviating)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What steps decide inside does not count in `stats`."""
        before = self._caches.counters.clone()
        yield
        self._caches.counters.copy_(before)
