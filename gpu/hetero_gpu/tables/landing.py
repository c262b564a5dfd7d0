"""Learn what became of prefetches, and await those that the running layer needs.

    land            position → host; takes note of all landings reported so far
    await_late      after `ensure` and `gather`, when the link is busy anyway: looks for landings until no
                    slot of the layer is in FETCH, or patience is over; lists what must be gathered after all;
                    before it looks, it asks for what is wanted next

What landed packed lies in staging buffers then, until `unpack_landed`.

A landing whose tag is still its slot's: FETCH → COMPUTE, or → EMPTY if nothing was copied and nobody needs
it. A worker that is stuck or dead costs one layer its patience (`MOST_LOOKS`); after that nobody waits until
a landing comes. So the device never hangs, and a layer always has its bytes: from the worker or by its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hetero_gpu.control.fault import TableError
from hetero_gpu.control.memory_order import load_acquire, store_release
from hetero_gpu.control.region import LANDING_WORDS, ControlRegion, Landed, Word
from hetero_gpu.overlap import meet, overlap_options
from hetero_gpu.tables.prefetch import Wanted, create_tasks, task_arguments, task_sizes
from hetero_gpu.tables.state import COUNTERS, MOST_LOOKS, NUM_COUNTERS, DeviceTables
from hetero_scheduler import SlotState

_EMPTY = tl.constexpr(int(SlotState.EMPTY))
_FETCH = tl.constexpr(int(SlotState.FETCH))
_COMPUTE = tl.constexpr(int(SlotState.COMPUTE))
_USED = tl.constexpr(int(SlotState.USED))
_ARRIVED = tl.constexpr(int(Landed.ARRIVED))
_BAD_LANDING_ERROR = tl.constexpr(int(TableError.BAD_LANDING))
_ENTRY = tl.constexpr(LANDING_WORDS)
_COUNTERS = tl.constexpr(NUM_COUNTERS)
_LOADS, _BYTES = tl.constexpr(COUNTERS.index("loads")), tl.constexpr(COUNTERS.index("bytes_moved"))
_DROPPED = tl.constexpr(COUNTERS.index("prefetches_dropped"))
_WASTED = tl.constexpr(COUNTERS.index("prefetches_wasted"))
_MOST_LOOKS = tl.constexpr(MOST_LOOKS)
_GATHERED, _AWAITED = tl.constexpr(1), tl.constexpr(2)


@dataclass(frozen=True)
class Landings:
    """Where landings are reported, and what they bring."""

    region: ControlRegion
    record_bytes: int
    """What crosses the link for one."""
    is_staged: bool = False
    """Whether landed bytes lie in staging buffers; then `unpack_landed` must follow before slabs are read."""


def landing_arguments(tables: DeviceTables, landings: Landings | None) -> tuple[object, ...]:
    """What `begin_layer` takes between tables and error word; without landings nothing of it is read."""
    link = (0, 0, 0, 0)
    if landings is not None:
        region = landings.region
        words = (region.address(Word.LANDING_TAIL), region.address(Word.POSITION))
        link = (region.landings_address, *words, landings.record_bytes)
    return (tables.landed_for_kernels, tables.patience, *link)


def land(tables: DeviceTables, landings: Landings) -> None:
    """While a task has no landing, tell the worker that a layer begins, and take note of every landing
    reported so far; otherwise nobody asks, and host memory is left alone. A landing whose tag is not its
    slot's any more changes nothing. Once a layer, before `ensure`, which can do it too. Asynchronous,
    capturable."""
    _land_kernel[(1,)](
        tables.for_kernels,
        *landing_arguments(tables, landings),
        tables.error_address,
        RING=landings.region.ring_size,
        NUM_SLOTS=tables.num_slots,
        NUM_EXPERTS=tables.num_experts,
        IS_STAGED=landings.is_staged,
        num_warps=1,
        **overlap_options(tables.device),
    )


def await_late(
    tables: DeviceTables, slots: torch.Tensor, landings: Landings, *, wanted: Wanted | None = None
) -> None:
    """Wait, within bounds, for the prefetches of `slots` (what `ensure(..., awaits_late=True)` returned);
    `gather(..., is_late=True)`, or `unpack_landed`, must follow. `wanted`: what `create_prefetch` is to ask
    for before that, in the same launch. Asynchronous, capturable."""
    num_pairs = slots.numel()
    _await_kernel[(1,)](
        tables.for_kernels,
        *landing_arguments(tables, landings),
        tables.error_address,
        slots,
        tables.late_slot,
        tables.late_key,
        tables.late_count,
        tables.pause_address,
        *task_arguments(landings.region, wanted),
        **task_sizes(tables, wanted),
        NUM_PAIRS=num_pairs,
        PAIR_BLOCK=triton.next_power_of_2(num_pairs),
        RING=landings.region.ring_size,
        NUM_SLOTS=tables.num_slots,
        NUM_EXPERTS=tables.num_experts,
        IS_STAGED=landings.is_staged,
        num_warps=1 if wanted is None else tables.num_warps,
        **overlap_options(tables.device),
    )


_ADDRESSES = ["landings_address", "landing_tail_address", "position_address", "error_address"]


@triton.jit(do_not_specialize=_ADDRESSES)  # type: ignore[untyped-decorator]
def _land_kernel(  # type: ignore[no-untyped-def]
    tables,
    landed,
    patience,
    landings_address,
    landing_tail_address,
    position_address,
    record_bytes,
    error_address,
    RING: tl.constexpr,  # noqa: N803
    NUM_SLOTS: tl.constexpr,  # noqa: N803
    NUM_EXPERTS: tl.constexpr,  # noqa: N803
    IS_STAGED: tl.constexpr,  # noqa: N803
    OVERLAPS: tl.constexpr,  # noqa: N803
):
    meet(OVERLAPS)
    begin_layer(
        tables, landed, patience, landings_address, landing_tail_address, position_address, record_bytes,
        error_address, RING, NUM_SLOTS, NUM_EXPERTS, IS_STAGED,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def begin_layer(  # type: ignore[no-untyped-def]
    tables,
    landed,
    patience,
    landings_address,
    landing_tail_address,
    position_address,
    record_bytes,
    error_address,
    RING: tl.constexpr,  # noqa: N803
    NUM_SLOTS: tl.constexpr,  # noqa: N803
    NUM_EXPERTS: tl.constexpr,  # noqa: N803
    IS_STAGED: tl.constexpr,  # noqa: N803
):
    """What `land` does, by one program. What it wrote is seen behind the next barrier."""
    if tl.load(tables.num_emitted) > tl.load(tables.num_landed):
        store_release(position_address, tl.load(tables.position) + 1)
        num_new = _take_landings(
            tables, landed, landings_address, landing_tail_address, error_address, record_bytes,
            RING, NUM_SLOTS, NUM_EXPERTS, IS_STAGED,
        )  # fmt: skip
        if num_new > 0:
            tl.store(patience, _MOST_LOOKS)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["pause_address", "tasks_address", "task_tail_address", "layer", *_ADDRESSES]
)
def _await_kernel(  # type: ignore[no-untyped-def]
    tables,
    landed,
    patience,
    landings_address,
    landing_tail_address,
    position_address,
    record_bytes,
    error_address,
    slots,
    late_slot,
    late_key,
    late_count,
    pause_address,
    keys,
    tasks_address,
    task_tail_address,
    layer,
    NUM_KEYS: tl.constexpr,  # noqa: N803
    KEPT_BACK: tl.constexpr,  # noqa: N803
    NUM_LAYERS: tl.constexpr,  # noqa: N803
    SLOT_BLOCK: tl.constexpr,  # noqa: N803
    NUM_PAIRS: tl.constexpr,  # noqa: N803
    PAIR_BLOCK: tl.constexpr,  # noqa: N803
    RING: tl.constexpr,  # noqa: N803
    NUM_SLOTS: tl.constexpr,  # noqa: N803
    NUM_EXPERTS: tl.constexpr,  # noqa: N803
    IS_STAGED: tl.constexpr,  # noqa: N803
    OVERLAPS: tl.constexpr,  # noqa: N803
):
    meet(OVERLAPS)
    if keys is not None:
        create_tasks(
            tables, position_address, keys, tasks_address, task_tail_address, layer,
            NUM_KEYS, KEPT_BACK, NUM_LAYERS, SLOT_BLOCK, RING, NUM_SLOTS, NUM_EXPERTS,
        )  # fmt: skip
        tl.debug_barrier()
    pairs = tl.arange(0, PAIR_BLOCK)
    slot = tl.load(slots + pairs, mask=pairs < NUM_PAIRS, other=-1)
    state = tl.load(tables.slot_state + slot, mask=slot >= 0, other=_EMPTY)
    filled = tl.load(tables.is_filled + slot, mask=slot >= 0, other=0)
    is_late = (slot >= 0) & (state == _FETCH) & (filled != _GATHERED)
    num_listed = 0
    if tl.max(is_late.to(tl.int32), axis=0) > 0:
        tl.debug_barrier()  # all warps have read what is written now, here and behind the loop
        tl.store(tables.is_filled + slot, tl.full((PAIR_BLOCK,), _AWAITED, tl.int8), mask=is_late)
        tl.store(tables.has_arrived + slot, tl.zeros((PAIR_BLOCK,), tl.int8), mask=is_late)
        looks = tl.load(patience)
        num_waiting = 1
        while (num_waiting > 0) & (looks > 0):
            tl.debug_barrier()
            _take_landings(
                tables, landed, landings_address, landing_tail_address, error_address, record_bytes,
                RING, NUM_SLOTS, NUM_EXPERTS, IS_STAGED,
            )  # fmt: skip
            tl.debug_barrier()
            state = tl.load(tables.slot_state + slot, mask=is_late, other=_COMPUTE)
            num_waiting = tl.sum((state == _FETCH).to(tl.int32), axis=0)
            looks -= 1
        tl.debug_barrier()
        tl.store(patience, tl.where(num_waiting > 0, 0, _MOST_LOOKS))
        tl.store(tables.slot_state + slot, _USED, mask=is_late & (state == _COMPUTE))  # its layer runs now
        is_missing = is_late & (tl.load(tables.has_arrived + slot, mask=is_late, other=1) == 0)
        while tl.max(is_missing.to(tl.int32), axis=0) > 0:
            chosen = tl.max(tl.where(is_missing, slot, -1), axis=0)
            is_missing = is_missing & (slot != chosen)
            tl.store(late_slot + num_listed, chosen)
            tl.store(late_key + num_listed, tl.load(tables.slot_key + chosen))
            if tl.max(tl.where(slot == chosen, state, _EMPTY), axis=0) == _FETCH:
                tl.store(tables.is_filled + chosen, _GATHERED)  # its landing may still come
            num_listed += 1
    tl.store(late_count, num_listed)
    if num_listed > 0:
        store_release(pause_address, 1)


@triton.jit  # type: ignore[untyped-decorator]
def _take_landings(  # type: ignore[no-untyped-def]
    tables,
    landed,
    landings_address,
    landing_tail_address,
    error_address,
    record_bytes,
    RING: tl.constexpr,  # noqa: N803
    NUM_SLOTS: tl.constexpr,  # noqa: N803
    NUM_EXPERTS: tl.constexpr,  # noqa: N803
    IS_STAGED: tl.constexpr,  # noqa: N803
):
    """Take note of the landings since the last look; returns how many there were."""
    taken = tl.load(tables.num_landed)
    tail = load_acquire(landing_tail_address)
    num_new = taken * 0
    if (tail < taken) | (tail > tl.load(tables.num_emitted)):
        store_release(error_address, _BAD_LANDING_ERROR)
    elif tail > taken:
        num_new = tail - taken
        index = taken + tl.arange(0, RING)
        is_new = index < tail
        offset = (index % RING) * (_ENTRY * 8)
        entry = (landings_address + offset).to(tl.pointer_type(tl.int64))
        slot = tl.load(entry, mask=is_new, other=-1, volatile=True)
        tag = tl.load(entry + 1, mask=is_new, other=0, volatile=True)
        status = tl.load(entry + 2, mask=is_new, other=0, volatile=True)
        buffer = tl.load(entry + 3, mask=is_new, other=0, volatile=True)
        is_known = is_new & (slot >= 0) & (slot < NUM_SLOTS)
        state = tl.load(tables.slot_state + slot, mask=is_known, other=_EMPTY)
        is_current = (
            is_known & (tl.load(tables.slot_tag + slot, mask=is_known, other=0) == tag) & (state == _FETCH)
        )
        filled = tl.load(tables.is_filled + slot, mask=is_current, other=0)
        key = tl.load(tables.slot_key + slot, mask=is_current, other=0)
        brings_bytes = is_current & (status == _ARRIVED)
        is_kept = brings_bytes | (is_current & (filled != 0))
        is_given_up = is_current & (is_kept == 0)
        is_wasted = tl.load(tables.is_unproven + slot, mask=is_given_up, other=0) != 0
        is_packed = brings_bytes & (filled != _GATHERED)
        num_packed = tl.load(landed.number)
        place = num_packed + tl.cumsum(is_packed.to(tl.int32), axis=0) - 1
        tl.debug_barrier()
        tl.store(tables.slot_state + slot, tl.where(is_kept, _COMPUTE, _EMPTY), mask=is_current)
        tl.store(tables.is_filled + slot, tl.zeros_like(filled), mask=is_current)
        tl.store(tables.is_unproven + slot, tl.zeros_like(filled), mask=is_given_up)
        tl.store(tables.has_arrived + slot, brings_bytes.to(tl.int8), mask=is_current)
        tl.store(tables.slot_of + key, tl.zeros_like(key) - 1, mask=is_given_up)
        tl.store(tables.slot_key + slot, tl.zeros_like(key) - 1, mask=is_given_up)
        if IS_STAGED:
            tl.store(landed.slot + place, slot.to(tl.int32), mask=is_packed)
            tl.store(landed.tag + place, tag, mask=is_packed)
            tl.store(landed.buffer + place, buffer.to(tl.int32), mask=is_packed)
            tl.store(landed.number, num_packed + tl.sum(is_packed.to(tl.int32), axis=0))
        column = tables.counters + (key // NUM_EXPERTS) * _COUNTERS
        one = tl.full(key.shape, 1, tl.int64)
        tl.atomic_add(column + _LOADS, one, mask=brings_bytes)
        tl.atomic_add(column + _BYTES, one * record_bytes, mask=brings_bytes)
        tl.atomic_add(column + _WASTED, one, mask=is_wasted)
        tl.atomic_add(column + _DROPPED, one, mask=is_current & (status != _ARRIVED))
        tl.store(tables.num_landed, tail)
        if tl.max((is_new & (is_known == 0)).to(tl.int32), axis=0) > 0:
            store_release(error_address, _BAD_LANDING_ERROR)
    return num_new
