"""A copy for every logical insertion, without delaying what a layer demands (PSR §4.2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from hetero_gpu import SlabCache, Transfer
from hetero_runtime.orchestrator.ahead import Ahead
from hetero_runtime.routing.routing import Routing
from hetero_scheduler import ExpertKey, Lookup
from hetero_scheduler.routing import LogicalCache


class CopiesAhead(Ahead):
    """Insertions are queued, and submitted at layer boundaries with at most `in_flight` on the link.

    Copies finish in the order of their submission, so what a layer demands waits behind at most so many. One
    that is still queued when its expert has left the logical cache is dropped. After a prompt, what its
    logical cache holds and no slab has is queued too, the warm set included.
    """

    def __init__(self, cache: SlabCache, routing: Routing, *, in_flight: int) -> None:
        self._cache, self._routing, self._in_flight = cache, routing, in_flight
        self._queue: deque[ExpertKey] = deque()
        self._under_way: dict[ExpertKey, Transfer] = {}
        self._of: LogicalCache | None = None

    def layer_begins(self, chosen: npt.NDArray[np.int64]) -> None:
        """The queue is one text's; another text's pass has other wishes."""
        single = self._routing.single
        cache = None if single is None else single.cache
        if cache is not self._of:
            self._queue.clear()
            self._of = cache

    def kept(self, layer: int) -> Collection[ExpertKey]:
        return [key for key in self._under_way if key.layer == layer and self._routing.is_resident(key)]

    def look_ahead(self, layer: int, running: list[ExpertKey]) -> None:
        if layer + 1 < self._routing.shape.num_layers:
            self._queue.extendleft(reversed(self._routing.steer(layer + 1)))
        self._submit(running)

    def layer_ends(self, layer: int, running: list[ExpertKey]) -> None:
        single = self._routing.single
        if single is not None and len(single.tokens) > 1:
            held = (ExpertKey(layer, expert) for expert in single.cache.residents(layer).tolist())
            self._queue.extend(key for key in held if self._cache.lookup(key) is Lookup.MISS)
        self._submit(running)

    def _submit(self, running: list[ExpertKey]) -> None:
        """Fill the link. `running`: experts that stay."""
        self._under_way = {key: copy for key, copy in self._under_way.items() if not copy.is_over()}
        while self._queue and len(self._under_way) < self._in_flight:
            key = self._queue[0]
            if self._routing.is_resident(key) and self._cache.lookup(key) is Lookup.MISS:
                spare = self._cache.num_available_after(key.layer, running)
                if spare <= self._routing.shape.top_k or not self._cache.prefetch(key, protected=running):
                    return
                self._under_way[key] = self._cache.transfer(key)
            self._queue.popleft()
