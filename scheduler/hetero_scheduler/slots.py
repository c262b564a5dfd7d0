"""The slot machine: which expert each slot holds and what may happen to it (SeqMoE §7.2).

    event                                        from            to
    ------------------------------------------------------------------------
    reserve(key, FETCH)      prefetch created    EMPTY | USED    FETCH
    reserve(key, COMPUTE)    on-demand load      EMPTY | USED    COMPUTE
    land(slot, tag)          prefetch arrived    FETCH           COMPUTE
    abort(slot, tag)         copy failed/stale   FETCH|COMPUTE   EMPTY
    release_layer(layer)     layer executes      COMPUTE         USED
    release(key)             expert executed     COMPUTE         USED
    evict(key)               dropped by caller   USED            EMPTY

An EMPTY slot may also be out of service (`retire`, `recall`): its memory was given back, and nothing is put
there meanwhile.

FETCH and COMPUTE are protected; only a USED, unpinned slot is ever evicted. Every reservation draws a new
tag from a counter that only grows, and a landing counts only while its tag is still the slot's: a stale copy
can never mark a slot that was given to another expert meanwhile.

This is the reference. It is host-side numpy, one owner, not thread-safe: the engine's step lock covers it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum, IntEnum
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hetero_scheduler.keys import ExpertKey

NO_SLOT = -1
Scores = npt.NDArray[np.float64]


class SlotState(IntEnum):
    """State of one slot; the table in the module docstring has the moves."""

    EMPTY = 0
    FETCH = 1
    COMPUTE = 2
    USED = 3


class Lookup(Enum):
    """Answer of `lookup`: not here, on its way, here."""

    MISS = "miss"
    PENDING = "pending"
    HIT = "hit"


class Reservation(NamedTuple):
    """A slot given to `key` under `tag`; `evicted` is the expert that had to leave, if any."""

    key: ExpertKey
    slot: int
    tag: int
    evicted: ExpertKey | None


class SlotCounts(NamedTuple):
    """How many slots are in each state; they sum to the number of slots."""

    empty: int
    fetch: int
    compute: int
    used: int


class SlotTable(NamedTuple):
    """All that a machine knows of its slots, to carry it to the device and back. `[num_slots]` each."""

    state: npt.NDArray[np.int8]
    """SlotState."""
    key: npt.NDArray[np.int32]
    """layer * num_experts + expert, NO_SLOT when EMPTY."""
    tag: npt.NDArray[np.int64]
    is_pinned: npt.NDArray[np.bool_]
    next_tag: int


class SlotMachine:
    """Owner of all slot states.

    `layer_slots=None`: one pool, every slot serves any layer. Otherwise each layer has a range of its own
    (PSR's C) of that many slots, and they sum to `num_slots`.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        num_layers: int,
        num_experts: int,
        layer_slots: Sequence[int] | None = None,
    ) -> None:
        if num_slots < 0:
            raise ValueError(f"num_slots is {num_slots}; there cannot be fewer than none")
        self.num_slots, self.num_layers, self.num_experts = num_slots, num_layers, num_experts
        self._pools = [range(num_slots)] * num_layers
        if layer_slots is not None:
            ends = list(accumulate(layer_slots))
            if len(ends) != num_layers or ends[-1] != num_slots:
                raise ValueError(f"layer_slots {list(layer_slots)} does not split {num_slots} slots")
            self._pools = [range(end - size, end) for end, size in zip(ends, layer_slots, strict=True)]
        self._state = np.zeros(num_slots, dtype=np.int8)
        self._key = np.full(num_slots, NO_SLOT, dtype=np.int32)  # layer * num_experts + expert
        self._tag = np.zeros(num_slots, dtype=np.int64)
        self._is_pinned = np.zeros(num_slots, dtype=bool)
        self._is_retired = np.zeros(num_slots, dtype=bool)
        self._slot_of = np.full((num_layers, num_experts), NO_SLOT, dtype=np.int32)
        self._num_empty = num_slots
        self._next_tag = 1

    # ---- queries: never change anything

    def lookup(self, key: ExpertKey) -> Lookup:
        """Whether `key` is absent, on its way (FETCH) or resident."""
        slot = self._slot_of[key]
        if slot == NO_SLOT:
            return Lookup.MISS
        return Lookup.PENDING if self._state[slot] == SlotState.FETCH else Lookup.HIT

    def slot(self, key: ExpertKey) -> int:
        """The slot of `key`; asserts that it has one."""
        slot = int(self._slot_of[key])
        assert slot != NO_SLOT, f"{key} holds no slot"
        return slot

    def state(self, slot: int) -> SlotState:
        """State of `slot`."""
        return SlotState(int(self._state[slot]))

    def tag(self, slot: int) -> int:
        """The tag that `slot` was last reserved under."""
        return int(self._tag[slot])

    def key(self, slot: int) -> ExpertKey | None:
        """The expert that `slot` holds or awaits; None when EMPTY."""
        key = int(self._key[slot])
        return None if key == NO_SLOT else ExpertKey(*divmod(key, self.num_experts))

    def pool_range(self, layer: int) -> range:
        """Slots that `layer` may use."""
        return self._pools[layer]

    def residents(self, layer: int) -> npt.NDArray[np.int64]:
        """Experts of `layer` whose lookup is HIT, ascending."""
        slots = self._slot_of[layer]
        return np.flatnonzero((slots != NO_SLOT) & (self._state[slots] != SlotState.FETCH))

    def slots(self, layer: int, experts: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """The slots of `experts` of `layer`, NO_SLOT for a MISS. `[n]`"""
        slots: npt.NDArray[np.int32] = self._slot_of[layer, experts]
        return slots

    def absent(self, layer: int) -> npt.NDArray[np.bool_]:
        """Whether each expert of `layer` is a MISS. `[num_experts]`"""
        is_absent: npt.NDArray[np.bool_] = self._slot_of[layer] == NO_SLOT
        return is_absent

    def present(self) -> npt.NDArray[np.bool_]:
        """Whether each expert is resident or on its way. `[num_layers, num_experts]`"""
        is_present: npt.NDArray[np.bool_] = self._slot_of != NO_SLOT
        return is_present

    def num_available(self, layer: int) -> int:
        """Slots of `layer`'s pool that a reservation could take now (EMPTY or evictable)."""
        pool = self.pool_range(layer)
        part = slice(pool.start, pool.stop)
        is_held = self._is_pinned[part] | self._is_retired[part]
        is_free = (self._state[part] == SlotState.EMPTY) | (self._state[part] == SlotState.USED)
        return int(np.count_nonzero(is_free & ~is_held))

    def num_held(self, layer: int, keys: Collection[ExpertKey]) -> int:
        """Slots of `layer`'s pool in which one of `keys` is on its way or awaits computation."""
        pool = self.pool_range(layer)
        flat = np.array([layer * self.num_experts + expert for layer, expert in keys], dtype=np.intp)
        slots = self._slot_of.take(flat)
        state = self._state[slots[(slots >= pool.start) & (slots < pool.stop)]]
        return int(np.count_nonzero((state == SlotState.FETCH) | (state == SlotState.COMPUTE)))

    def num_fetching(self, layer: int) -> int:
        """Slots of `layer`'s pool in FETCH."""
        pool = self.pool_range(layer)
        return int(np.count_nonzero(self._state[pool.start : pool.stop] == SlotState.FETCH))

    def num_in_service(self, layer: int) -> int:
        """Slots of `layer`'s pool that are not retired, pinned ones left out."""
        pool = self.pool_range(layer)
        part = slice(pool.start, pool.stop)
        return int(np.count_nonzero(~(self._is_retired[part] | self._is_pinned[part])))

    def spare(self, *, score: Scores, least: int) -> int | None:
        """The slot to retire next: EMPTY ones first, then the USED one of least `score`; None where that
        would leave some layer fewer than `least` in service."""
        pools = {pool for layer, pool in enumerate(self._pools) if self.num_in_service(layer) > least}
        for pool in sorted(pools, key=lambda pool: pool.start):
            slot = self._first_empty(pool)
            if slot is not None:
                return slot
        used = [slot for pool in pools if (slot := self._least_used(pool, score, ())) is not None]
        return min(used, key=lambda slot: (score[self._expert_in(slot)], slot), default=None)

    def num_empty(self, layer: int) -> int:
        """EMPTY slots of `layer`'s pool that are in service."""
        if not self._num_empty:
            return 0
        pool = self.pool_range(layer)
        part = slice(pool.start, pool.stop)
        return int(np.count_nonzero((self._state[part] == SlotState.EMPTY) & ~self._is_retired[part]))

    def counts(self) -> SlotCounts:
        """Slots by state."""
        return SlotCounts(*np.bincount(self._state, minlength=len(SlotState)).tolist())

    # ---- commands

    def reserve(
        self,
        key: ExpertKey,
        state: SlotState,
        *,
        score: Scores,
        protected: Collection[ExpertKey] = (),
    ) -> Reservation | None:
        """Give `key` a slot, EMPTY first, then the USED one of least `score[layer, expert]`, ties to the
        lowest slot. None, with nothing changed, when every slot of the pool is protected.

        `score`: `[num_layers, num_experts]`; an expert that scores infinity must stay. `protected`: further
        experts that must stay although they are USED.
        """
        assert state in (SlotState.FETCH, SlotState.COMPUTE), f"nothing is reserved as {state.name}"
        assert self._slot_of[key] == NO_SLOT, f"{key} already holds slot {self._slot_of[key]}"
        pool = self.pool_range(key.layer)
        slot = self._first_empty(pool)
        if slot is None:
            slot = self._least_used(pool, score, protected)
        if slot is None:
            return None
        evicted = self.key(slot)
        if evicted is None:
            self._num_empty -= 1
        else:
            self._slot_of[evicted] = NO_SLOT
        self._state[slot], self._slot_of[key] = state, slot
        self._key[slot] = key.layer * self.num_experts + key.expert
        self._tag[slot], self._next_tag = self._next_tag, self._next_tag + 1
        return Reservation(key, slot, int(self._tag[slot]), evicted)

    def is_current(self, slot: int, tag: int) -> bool:
        """Whether `tag` is still the one that `slot` was last reserved under."""
        return bool(self._tag[slot] == tag) and self._state[slot] != SlotState.EMPTY

    def land(self, slot: int, tag: int) -> None:
        """A prefetch arrived: FETCH→COMPUTE. A stale tag changes nothing."""
        if self.is_current(slot, tag):
            self._move(slot, {SlotState.FETCH}, SlotState.COMPUTE)

    def abort(self, slot: int, tag: int) -> None:
        """A copy failed or is no longer wanted: →EMPTY. A stale tag changes nothing."""
        if self.is_current(slot, tag):
            self._move(slot, {SlotState.FETCH, SlotState.COMPUTE}, SlotState.EMPTY)
            self._clear(slot)

    def release(self, key: ExpertKey) -> None:
        """The expert was executed (or its layer needs it no more): COMPUTE→USED; USED stays USED."""
        self._move(self.slot(key), {SlotState.COMPUTE, SlotState.USED}, SlotState.USED)

    def release_slots(self, slots: Sequence[int]) -> None:
        """`release` of the experts in `slots`, all at once."""
        states = self._state[slots]
        assert ((states == SlotState.COMPUTE) | (states == SlotState.USED)).all(), (
            f"illegal release of slots {slots}, in states {states}"
        )
        self._state[slots] = SlotState.USED

    def release_layer(self, layer: int) -> None:
        """Before `layer`'s experts run: all its COMPUTE slots→USED, prefetched-but-unwanted ones included."""
        mine = (self._key // self.num_experts == layer) & (self._state == SlotState.COMPUTE)
        self._state[mine] = SlotState.USED

    def evict(self, key: ExpertKey) -> None:
        """Drop a USED expert: →EMPTY."""
        slot = self.slot(key)
        assert not self._is_pinned[slot], f"{key} is pinned"
        self._move(slot, {SlotState.USED}, SlotState.EMPTY)
        self._clear(slot)

    def pin(self, key: ExpertKey) -> None:
        """Keep a resident expert out of reach of eviction."""
        assert self.lookup(key) is Lookup.HIT, f"{key} is not resident, so it cannot be pinned"
        self._is_pinned[self.slot(key)] = True

    def unpin(self, key: ExpertKey) -> None:
        """Make a pinned expert evictable again."""
        self._is_pinned[self.slot(key)] = False

    def retire(self, slot: int) -> None:
        """Take an EMPTY slot out of service."""
        assert self.state(slot) is SlotState.EMPTY, f"slot {slot} holds {self.key(slot)}"
        assert not self._is_retired[slot], f"slot {slot} is retired already"
        self._is_retired[slot] = True
        self._num_empty -= 1

    def recall(self, num_slots: int) -> int:
        """Bring up to `num_slots` retired slots back, the lowest first. Returns how many."""
        slots = np.flatnonzero(self._is_retired)[:num_slots]
        self._is_retired[slots] = False
        self._num_empty += slots.size
        return int(slots.size)

    # ---- the whole machine at once

    def export(self) -> SlotTable:
        """A copy of everything, for `restore` of a machine of the same sizes (or the device tables)."""
        return SlotTable(
            self._state.copy(), self._key.copy(), self._tag.copy(), self._is_pinned.copy(), self._next_tag
        )

    def restore(self, table: SlotTable) -> None:
        """Become what `table` says; asserts that it obeys the rules, tags that only grow included."""
        assert table.next_tag >= self._next_tag, f"next tag {table.next_tag} < {self._next_tag}"
        self._state[:], self._key[:], self._tag[:] = table.state, table.key, table.tag
        self._is_pinned[:], self._next_tag = table.is_pinned, table.next_tag
        assert not self._is_retired.any(), "a machine with retired slots is not replaced"
        self._num_empty = int(np.count_nonzero(self._state == SlotState.EMPTY))
        held = np.flatnonzero(table.key != NO_SLOT)
        self._slot_of.fill(NO_SLOT)
        self._slot_of[np.divmod(table.key[held], self.num_experts)] = held
        self.check()

    # ---- integrity

    def check(self) -> None:
        """Assert that slots are conserved and both tables agree; the message is the broken equation."""
        counts = self.counts()
        assert sum(counts) == self.num_slots, f"{counts} does not sum to {self.num_slots} slots"
        num_retired = int(np.count_nonzero(self._is_retired))
        assert counts.empty == self._num_empty + num_retired, (
            f"{counts.empty} slots EMPTY != {self._num_empty} counted + {num_retired} retired"
        )
        assert not (self._state[self._is_retired] != SlotState.EMPTY).any(), "a retired slot is not EMPTY"
        held = np.flatnonzero(self._state != SlotState.EMPTY)
        assert not (self._key[self._state == SlotState.EMPTY] != NO_SLOT).any(), (
            "an EMPTY slot names an expert"
        )
        assert (self._key[held] != NO_SLOT).all(), "a slot that is not EMPTY names no expert"
        layer, expert = np.divmod(self._key[held], self.num_experts)
        strayed = held[self._slot_of[layer, expert] != held]
        assert not strayed.size, f"slots {strayed} name experts that the table has elsewhere"
        first, end = np.array([(pool.start, pool.stop) for pool in self._pools])[layer].T
        outside = held[(held < first) | (held >= end)]
        assert not outside.size, f"slots {outside} lie outside the pools of their experts' layers"
        num_mapped = int(np.count_nonzero(self._slot_of != NO_SLOT))
        assert num_mapped == held.size, f"{num_mapped} experts mapped != {held.size} slots held"

    # ---- internals

    def _first_empty(self, pool: range) -> int | None:
        if not self._num_empty:
            return None
        part = slice(pool.start, pool.stop)
        empty = np.flatnonzero((self._state[part] == SlotState.EMPTY) & ~self._is_retired[part])
        return pool.start + int(empty[0]) if empty.size else None

    def _least_used(self, pool: range, score: Scores, protected: Collection[ExpertKey]) -> int | None:
        part = slice(pool.start, pool.stop)
        is_candidate = (self._state[part] == SlotState.USED) & ~self._is_pinned[part]
        for key in protected:
            slot = self._slot_of[key]
            if pool.start <= slot < pool.stop:
                is_candidate[slot - pool.start] = False
        scores = np.where(is_candidate, score.take(self._key[part], mode="wrap"), np.inf)
        if not scores.size:
            return None
        least = int(scores.argmin())
        return None if scores[least] == np.inf else pool.start + least

    def _expert_in(self, slot: int) -> ExpertKey:
        key = self.key(slot)
        assert key is not None, f"slot {slot} holds nobody"
        return key

    def _clear(self, slot: int) -> None:
        key = self._expert_in(slot)
        self._slot_of[key], self._key[slot] = NO_SLOT, NO_SLOT
        self._num_empty += 1

    def _move(self, slot: int, allowed: set[SlotState], to: SlotState) -> None:
        now = self.state(slot)
        assert now in allowed, f"illegal move of slot {slot} ({self.key(slot)}): {now.name} to {to.name}"
        self._state[slot] = to
