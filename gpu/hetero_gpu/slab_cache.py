"""The slab expert cache: slots, slabs and copies behind one set of verbs.

Order of one layer, as its caller sees it:

    begin_layer(l, needed)    prefetches for l land or are dropped; what else l held becomes evictable
    load(key, protected) ...  two-phase: a slot is reserved, the copy submitted; failure gives the slot back
    wait(key) → slab(key)     computation from here on sees the bytes
    release(keys)             executed: evictable again, and no copy overwrites them before they were read
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from hetero_gpu.cache_stats import CacheStats
from hetero_gpu.slabs import SlabPool
from hetero_gpu.transfer import Copier, Fence, Record, Transfer
from hetero_scheduler import EvictionPolicy, ExpertKey, Lookup, SlotCounts, SlotMachine, SlotState
from hetero_scheduler.slots import NO_SLOT, Scores

R = TypeVar("R", bound=Record)


class SlabCache:
    """See the module docstring. One owner at a time: the engine's step lock covers every call."""

    def __init__(
        self,
        *,
        slabs: SlabPool,
        machine: SlotMachine,
        eviction: EvictionPolicy,
        copier: Copier[R],
        record: Callable[[ExpertKey], R],
    ) -> None:
        assert slabs.num_slabs == machine.num_slots, f"{slabs.num_slabs} slabs != {machine.num_slots} slots"
        self._slabs, self._machine, self._eviction = slabs, machine, eviction
        self._copier: Copier[Any] = copier
        self._record: Callable[[ExpertKey], Any] = record
        self._in_flight: dict[int, Transfer] = {}
        self._fetching: dict[ExpertKey, None] = {}  # in the order of their submission
        self._unproven: set[ExpertKey] = set()  # prefetched, and not required since
        self._num_unfollowed = 0  # of them, those that were lent
        self._last_read = self._fence_all()  # before, the memory of the slabs may have been another tensor's
        self._stats = CacheStats()

    # ---- queries

    def lookup(self, key: ExpertKey) -> Lookup:
        """MISS, PENDING (prefetch under way) or HIT."""
        return self._machine.lookup(key)

    def slot(self, key: ExpertKey) -> int:
        """Slot of a resident or pending expert."""
        return self._machine.slot(key)

    def residents(self, layer: int) -> npt.NDArray[np.int64]:
        """Experts of `layer` that are a HIT, ascending."""
        return self._machine.residents(layer)

    def slots(self, layer: int, experts: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Slots of `experts` of `layer`, resident or pending. `[n]`"""
        return self._machine.slots(layer, experts)

    def absent(self, layer: int) -> npt.NDArray[np.bool_]:
        """Whether each expert of `layer` is a MISS. `[num_experts]`"""
        return self._machine.absent(layer)

    def present(self) -> npt.NDArray[np.bool_]:
        """Whether each expert is resident or on its way. `[num_layers, num_experts]`"""
        return self._machine.present()

    def num_available_after(self, layer: int, executed: Collection[ExpertKey]) -> int:
        """Slots that a load for `layer` could take once `executed` have been executed."""
        return self._machine.num_available(layer) + self._machine.num_held(layer, executed)

    def transfer(self, key: ExpertKey) -> Transfer:
        """The copy of a prefetch that was submitted just now."""
        return self._in_flight[self._machine.slot(key)]

    def under_way(self, key: ExpertKey) -> Transfer | None:
        """The copy that a resident or pending expert still waits for; None once somebody has waited."""
        return self._in_flight.get(self._machine.slot(key))

    def by_arrival(self, keys: Iterable[ExpertKey]) -> list[ExpertKey]:
        """Resident or pending `keys` in the order in which their copies were submitted, and so arrive."""
        return sorted(keys, key=lambda key: self._machine.tag(self._machine.slot(key)))

    def num_on_the_way(self) -> int:
        """Prefetches whose bytes have not arrived yet."""
        count = 0
        for key in reversed(self._fetching):  # copies finish in order, so all before an arrived one have too
            if self._in_flight[self._machine.slot(key)].is_done():
                break
            count += 1
        return count

    def slab(self, key: ExpertKey) -> torch.Tensor:
        """Bytes of a resident expert. uint8 `[record_bytes]`; valid between `wait` and `release`."""
        return self._slabs.slab(self._machine.slot(key))

    def pool(self, layer: int) -> range:
        """The slots that `layer` may use."""
        return self._machine.pool_range(layer)

    def pool_size(self, layer: int) -> int:
        """Slots that `layer` may use, in whatever state."""
        return len(self._machine.pool_range(layer))

    def num_available(self, layer: int) -> int:
        """Slots that a load for `layer` could take now."""
        return self._machine.num_available(layer)

    def num_fetching(self, layer: int) -> int:
        """Slots that `layer` may use and that hold a prefetch, arrived or not, whose layer has not begun."""
        return self._machine.num_fetching(layer)

    def num_empty(self, layer: int) -> int:
        """Slots that a load for `layer` could take with nobody leaving."""
        return self._machine.num_empty(layer)

    def counts(self) -> SlotCounts:
        """Slots by state."""
        return self._machine.counts()

    def stats(self) -> CacheStats:
        """A copy of the counters."""
        return replace(self._stats)

    def stall_s(self) -> float:
        """Seconds that computation has waited for copies."""
        return self._copier.stall_s()

    def check(self) -> None:
        """Assert that slots are conserved, every copy in flight belongs to a held slot, and every prefetch
        has come to one end or is still awaited."""
        self._machine.check()
        num_fetching = self._machine.counts().fetch
        assert len(self._fetching) == num_fetching, (
            f"{len(self._fetching)} prefetches != {num_fetching} slots"
        )
        for slot in self._in_flight:
            assert self._machine.state(slot) is not SlotState.EMPTY, (
                f"a copy into empty slot {slot} is tracked"
            )
        num_open = len(self._unproven) + self._num_unfollowed
        assert self._stats.prefetches_open == num_open, f"{num_open} prefetches are open: {self._stats}"

    # ---- commands

    def begin_layer(
        self, layer: int, needed: Collection[ExpertKey], *, kept: Collection[ExpertKey] = ()
    ) -> None:
        """`layer` is about to run `needed`: count them, land or drop its prefetches, free the rest.

        `kept`: prefetches that stay on their way although the layer runs without them.
        """
        for key in [key for key in self._fetching if key.layer == layer]:
            self._land_or_drop(key, is_needed=key in needed or key in kept)
            if key in self._fetching and key in needed:
                self._in_flight[self._machine.slot(key)].hurry()
        self._count(layer, needed)
        self._machine.release_layer(layer)

    def load(
        self, key: ExpertKey, *, protected: Collection[ExpertKey] = (), score: Scores | None = None
    ) -> bool:
        """Submit an on-demand load. False, with nothing changed, when every slot is protected.

        `score`: who gives way, `[num_layers, num_experts]`, in place of the policy's word; see
        `SlotMachine.reserve`.
        """
        if not self._submit(key, SlotState.COMPUTE, protected, score):
            return False
        self._in_flight[self._machine.slot(key)].hurry()
        return True

    def prefetch(
        self, key: ExpertKey, *, protected: Collection[ExpertKey] = (), score: Scores | None = None
    ) -> bool:
        """Submit a load for a layer to come. Arguments and answer as for `load`, but the policy may guard
        experts against it."""
        score = self._eviction.prefetch_score if score is None else score
        if not self._submit(key, SlotState.FETCH, protected, score):
            return False
        self._fetching[key] = None
        self._unproven.add(key)
        self._stats.prefetches += 1
        return True

    def wait(self, key: ExpertKey) -> None:
        """Make computation submitted from now on see the bytes of `key`.

        Raises what kept them from coming; the slot is then empty again.
        """
        transfer = self._in_flight.pop(self._machine.slot(key), None)
        if transfer is not None:
            try:
                transfer.wait()
            except BaseException:
                transfer.give_up()
                self._lose(key)
                raise
        if key in self._fetching:
            self._land(key)

    def wait_all(self, keys: Collection[ExpertKey]) -> None:
        """`wait` for each of `keys`, at the price of one: copies finish in the order of their submission."""
        slots = [self._machine.slot(key) for key in keys]
        transfers = {slot: self._in_flight.pop(slot) for slot in slots if slot in self._in_flight}
        if transfers:
            transfers[max(transfers, key=self._machine.tag)].wait()
        for key in keys:
            if key in self._fetching:
                self._land(key)

    def release(self, keys: Iterable[ExpertKey]) -> None:
        """`keys` were executed: evictable; a copy over them starts once the compute stream gets here."""
        fence = self._copier.fence()
        slots = [self._machine.slot(key) for key in keys]
        self._machine.release_slots(slots)
        if fence is not None:
            self._last_read.update(dict.fromkeys(slots, fence))

    def settle(self) -> None:
        """After a pass was given up half-way: what awaits computation becomes evictable, prefetches land or
        are dropped."""
        for key in list(self._fetching):
            self._land_or_drop(key, is_needed=False)
        for layer in range(self._machine.num_layers):
            self._machine.release_layer(layer)

    def lend(self, take: Callable[[SlotMachine, EvictionPolicy], None]) -> None:
        """Let `take` read or replace the state of machine and policy, with no copy under way.

        Waits for all copies; prefetched experts become evictable. The next copy into any slab starts after
        what the compute stream has been given until now.
        """
        self._copier.synchronize()
        for key in list(self._fetching):
            self._land(key)
        self._in_flight.clear()
        self.settle()
        take(self._machine, self._eviction)
        self._num_unfollowed += len(self._unproven)
        self._unproven.clear()  # whether it is still here is not followed from now on
        self._last_read = self._fence_all()

    def pin(self, key: ExpertKey) -> None:
        """Load `key` if need be and keep it for good (the pinned prefix)."""
        if self.lookup(key) is Lookup.MISS:
            assert self.load(key), f"no slot is left to pin {key}"
        self.wait(key)
        self._machine.release(key)
        self._machine.pin(key)

    def unpin(self, key: ExpertKey) -> None:
        """Let a resident expert be evicted again, pinned or not."""
        self._machine.unpin(key)

    def close(self) -> None:
        """Wait for every copy and free what copies go through. Only queries may follow."""
        self._copier.close()

    # ---- a pool that shrinks and grows

    def shrink(self, num_slots: int, *, least: int) -> list[int]:
        """Take up to `num_slots` slots out of service, empty ones first, then those that the policy would
        evict first; every layer keeps `least` in service. Returns them: nobody reads their slabs."""
        taken: list[int] = []
        while len(taken) < num_slots:
            slot = self._machine.spare(score=self._eviction.score, least=least)
            if slot is None:
                break
            key = self._machine.key(slot)
            if key is not None:
                self._lose(key)
                self._stats.evictions += 1
            self._machine.retire(slot)
            taken.append(slot)
        return taken

    def grow(self, num_slots: int) -> int:
        """Bring up to `num_slots` slots back into service, empty. Returns how many."""
        return self._machine.recall(num_slots)

    # ---- internals

    def _lose(self, key: ExpertKey) -> None:
        """The bytes of `key` did not come, or must go: its slot is empty, whatever state it was in."""
        slot = self._machine.slot(key)
        transfer = self._in_flight.pop(slot, None)
        if transfer is not None:
            transfer.give_up()
        self._fetching.pop(key, None)
        if self._machine.state(slot) is SlotState.USED:
            self._machine.evict(key)
        else:
            self._machine.abort(slot, self._machine.tag(slot))
        self._has_left(key)

    def _count(self, layer: int, needed: Collection[ExpertKey]) -> None:
        """`layer` asks for `needed`. One whose copy failed in a pass that was given up is lost: a miss."""
        late = [key for key in needed if key in self._fetching]
        experts = np.array([key.expert for key in needed], dtype=np.int64)
        slots = self._machine.slots(layer, experts).tolist()
        lost = [key for key, slot in zip(needed, slots, strict=True) if self._is_lost(key, slot)]
        for key in lost:
            self._lose(key)
        num_missing = slots.count(NO_SLOT) + len(lost)
        self._stats.required += len(needed)
        self._stats.hits += len(needed) - len(late) - num_missing
        self._stats.late += len(late)
        self._stats.misses += num_missing
        self._stats.stalls += bool(late or num_missing)
        proven = self._unproven.intersection(needed)
        self._unproven -= proven
        self._stats.hits_prefetched += len(proven.difference(late))

    def _is_lost(self, key: ExpertKey, slot: int) -> bool:
        transfer = self._in_flight.get(slot)
        if transfer is None or key in self._fetching:
            return False
        return transfer.is_over() and not transfer.is_done()

    def _fence_all(self) -> dict[int, Fence]:
        """By slot: what the compute stream has been given until now."""
        fence = self._copier.fence()
        return {} if fence is None else dict.fromkeys(range(self._machine.num_slots), fence)

    def _land_or_drop(self, key: ExpertKey, *, is_needed: bool) -> None:
        transfer = self._in_flight[self._machine.slot(key)]
        if transfer.is_done():
            self._land(key)
        elif not is_needed or transfer.is_over():
            # copies into one slab keep their order, so it can be given away while this one is on its way
            self._lose(key)
            self._stats.prefetches_dropped += 1

    def _land(self, key: ExpertKey) -> None:
        slot = self._machine.slot(key)
        self._machine.land(slot, self._machine.tag(slot))
        self._fetching.pop(key, None)

    def _submit(
        self, key: ExpertKey, state: SlotState, protected: Collection[ExpertKey], score: Scores | None
    ) -> bool:
        score = self._eviction.score if score is None else score
        held = self._machine.reserve(key, state, score=score, protected=protected)
        if held is None:
            return False
        if held.evicted is not None:  # gone, also if nobody comes instead
            self._stats.evictions += 1
            self._has_left(held.evicted)
        before = self._in_flight.pop(held.slot, None)
        if before is not None:  # of a pass that was given up
            before.give_up()
        try:
            record = self._record(key)
            transfer = self._copier.submit(
                record, self._slabs.landing(held.slot), after=self._last_read.get(held.slot)
            )
        except BaseException:
            self._machine.abort(held.slot, held.tag)
            raise
        self._in_flight[held.slot] = transfer
        self._stats.loads += 1
        self._stats.bytes_moved += record.nbytes
        return True

    def _has_left(self, key: ExpertKey) -> None:
        if key in self._unproven:
            self._unproven.remove(key)
            self._stats.prefetches_wasted += 1
