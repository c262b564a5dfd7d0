"""Ask for prefetches: reserve slots, send tasks.

    create_prefetch   for each wanted key without a slot, in order: reserve a FETCH slot under a new tag,
                      task (key, slot, tag, deadline) → task ring

A FETCH slot is given to nobody else before its landing (`landing`): a copy under way can never write over
another expert. The device waits for nothing here: what no longer fits into the ring is not asked for.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hetero_gpu.control.memory_order import pointer_to, store_release
from hetero_gpu.control.region import TASK_WORDS, ControlRegion, Word
from hetero_gpu.overlap import meet, overlap_options
from hetero_gpu.tables.state import COUNTERS, NUM_COUNTERS, DeviceTables
from hetero_scheduler import SlotState

_EMPTY = tl.constexpr(int(SlotState.EMPTY))
_FETCH = tl.constexpr(int(SlotState.FETCH))
_USED = tl.constexpr(int(SlotState.USED))
_ENTRY = tl.constexpr(TASK_WORDS)
_COUNTERS = tl.constexpr(NUM_COUNTERS)
_PREFETCHES = tl.constexpr(COUNTERS.index("prefetches"))
_EVICTIONS = tl.constexpr(COUNTERS.index("evictions"))
_WASTED = tl.constexpr(COUNTERS.index("prefetches_wasted"))


class Wanted(NamedTuple):
    """What `create_prefetch` takes."""

    layer: int
    keys: torch.Tensor
    kept_back: int = 0


def create_prefetch(
    tables: DeviceTables, layer: int, keys: torch.Tensor, *, region: ControlRegion, kept_back: int = 0
) -> None:
    """Ask for `keys` (int32 `[N]`, layer * num_experts + expert, the most wanted first, -1: none).

    Called between `ensure(layer)` and the next `ensure`. Keys that hold a slot, or for which none may be
    evicted, are passed over; experts that `layer` requires are never evicted. `kept_back`: slots of a pool
    that stay EMPTY or evictable once their layer is done, so that prefetches which come too late, and wait a
    whole pass for their layer, never starve what is required. The deadline of a task is the next time that
    its layer begins. Asynchronous, capturable.
    """
    wanted = Wanted(layer, keys, kept_back)
    _create_kernel[(1,)](
        tables.for_kernels,
        region.address(Word.POSITION),
        *task_arguments(region, wanted),
        **task_sizes(tables, wanted),
        RING=region.ring_size,
        NUM_SLOTS=tables.num_slots,
        NUM_EXPERTS=tables.num_experts,
        num_warps=tables.num_warps,
        **overlap_options(tables.device),
    )


def task_arguments(region: ControlRegion, wanted: Wanted | None) -> tuple[object, ...]:
    """What `create_tasks` takes besides tables and position; no keys where nothing is wanted."""
    if wanted is None:
        return (None, 0, 0, 0)
    if wanted.keys.dtype != torch.int32 or not wanted.keys.is_contiguous():
        raise ValueError(f"keys must be contiguous int32, not {wanted.keys.dtype}")
    return (wanted.keys, region.tasks_address, region.address(Word.TASK_TAIL), wanted.layer)


def task_sizes(tables: DeviceTables, wanted: Wanted | None) -> dict[str, int]:
    """What it is compiled for, besides what all kernels of the tables are."""
    return {
        "NUM_KEYS": 0 if wanted is None else wanted.keys.numel(),
        "KEPT_BACK": 0 if wanted is None else wanted.kept_back,
        "NUM_LAYERS": tables.num_layers,
        "SLOT_BLOCK": triton.next_power_of_2(tables.num_slots),
    }


_ADDRESSES = ["position_address", "tasks_address", "task_tail_address"]


@triton.jit(do_not_specialize=[*_ADDRESSES, "layer"])  # type: ignore[untyped-decorator]
def _create_kernel(  # type: ignore[no-untyped-def]
    tables,
    position_address,
    keys,
    tasks_address,
    task_tail_address,
    layer,
    NUM_KEYS: tl.constexpr,  # noqa: N803
    KEPT_BACK: tl.constexpr,  # noqa: N803
    NUM_LAYERS: tl.constexpr,  # noqa: N803
    SLOT_BLOCK: tl.constexpr,  # noqa: N803
    RING: tl.constexpr,  # noqa: N803
    NUM_SLOTS: tl.constexpr,  # noqa: N803
    NUM_EXPERTS: tl.constexpr,  # noqa: N803
    OVERLAPS: tl.constexpr,  # noqa: N803
):
    meet(OVERLAPS)
    create_tasks(
        tables, position_address, keys, tasks_address, task_tail_address, layer,
        NUM_KEYS, KEPT_BACK, NUM_LAYERS, SLOT_BLOCK, RING, NUM_SLOTS, NUM_EXPERTS,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def create_tasks(  # type: ignore[no-untyped-def]
    tables,
    position_address,
    keys,
    tasks_address,
    task_tail_address,
    layer,
    NUM_KEYS: tl.constexpr,  # noqa: N803
    KEPT_BACK: tl.constexpr,  # noqa: N803
    NUM_LAYERS: tl.constexpr,  # noqa: N803
    SLOT_BLOCK: tl.constexpr,  # noqa: N803
    RING: tl.constexpr,  # noqa: N803
    NUM_SLOTS: tl.constexpr,  # noqa: N803
    NUM_EXPERTS: tl.constexpr,  # noqa: N803
):
    """What `create_prefetch` does, by one program. What it wrote is seen behind the next barrier."""
    slots = tl.arange(0, SLOT_BLOCK)
    is_slot = slots < NUM_SLOTS
    now = tl.load(tables.position)
    tag = tl.load(tables.next_tag)
    first = tl.load(tables.num_emitted)
    emitted = first
    room_end = tl.load(tables.num_landed) + RING
    key_in = tl.load(tables.slot_key + slots, mask=is_slot, other=-1)
    state = tl.load(tables.slot_state + slots, mask=is_slot, other=_FETCH)
    last = tl.load(tables.slot_last + slots, mask=is_slot, other=0)
    pinned = tl.load(tables.is_pinned + slots, mask=is_slot, other=1)
    unproven = tl.load(tables.is_unproven + slots, mask=is_slot, other=0).to(tl.int32)
    is_evictable = is_slot & (state == _USED) & (pinned == 0) & (last != now)
    rank = tl.load(tables.score + key_in, mask=is_evictable, other=float("inf"))
    i = 0
    while i < NUM_KEYS:
        tl.debug_barrier()  # slot_of as the last turn left it
        key = tl.load(keys + i)
        held = tl.load(tables.slot_of + key, mask=key >= 0, other=0)
        i += 1
        if (held < 0) & (emitted < room_end):
            key_layer = key // NUM_EXPERTS
            pool = tables.pools + 2 * key_layer
            chosen = first_free(slots, state, rank, pool, SLOT_BLOCK)
            if (chosen >= 0) & (num_free(slots, state, pinned, pool) > KEPT_BACK):
                is_chosen = slots == chosen
                evicted = tl.max(tl.where(is_chosen, key_in, -1), axis=0)
                is_wasted = tl.max(tl.where(is_chosen, unproven, 0), axis=0)
                rank = tl.where(is_chosen, float("inf"), rank)
                state = tl.where(is_chosen, _FETCH, state)
                key_in = tl.where(is_chosen, key, key_in)
                deadline = now + 1 + (key_layer - layer + NUM_LAYERS - 1) % NUM_LAYERS
                write_task(
                    key, chosen, tag, deadline, evicted, is_wasted, key_layer, tables,
                    tasks_address + (emitted % RING) * (_ENTRY * 8),
                )  # fmt: skip
                tag += 1
                emitted += 1
    tl.debug_barrier()
    if emitted > first:
        tl.store(tables.slot_key + slots, key_in, mask=is_slot)
        tl.store(tables.slot_state + slots, state, mask=is_slot)
        tl.store(tables.next_tag, tag)
        tl.store(tables.num_emitted, emitted)
        send_tasks(emitted, now, task_tail_address, position_address)


@triton.jit
def send_tasks(emitted, position, task_tail_address, position_address):  # type: ignore[no-untyped-def]
    """All tasks that were written, `emitted` so far, are the worker's from now on. It counts from `position`,
    which is that of the running layer: `land` tells of it only while tasks are on their way."""
    tl.store(pointer_to(position_address, tl.int64), position)
    store_release(task_tail_address, emitted)


@triton.jit  # type: ignore[untyped-decorator]
def first_free(slots, state, rank, pool, SLOT_BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """The slot of a pool that is given away next: the first EMPTY one, else the one of least rank; -1 where
    there is none. `pool`: pointer to its bounds. `rank`: score, infinite where a slot must stay."""
    in_pool = (slots >= tl.load(pool)) & (slots < tl.load(pool + 1))
    first_empty = tl.min(tl.where(in_pool & (state == _EMPTY), slots, SLOT_BLOCK), axis=0)
    least, least_slot = tl.min(tl.where(in_pool, rank, float("inf")), axis=0, return_indices=True)
    chosen = tl.where(least < float("inf"), least_slot, -1)
    return tl.where(first_empty < SLOT_BLOCK, first_empty, chosen)


@triton.jit
def num_free(slots, state, pinned, pool):  # type: ignore[no-untyped-def]
    """Slots of a pool that are EMPTY, or evictable once the running layer is done. `pool` as above."""
    in_pool = (slots >= tl.load(pool)) & (slots < tl.load(pool + 1))
    is_free = in_pool & ((state == _EMPTY) | (state == _USED)) & (pinned == 0)
    return tl.sum(is_free.to(tl.int32), axis=0)


@triton.jit
def write_task(  # type: ignore[no-untyped-def]
    key, slot, tag, deadline, evicted, is_wasted, key_layer, tables, entry_address
):
    """`slot` is `key`'s, of `key_layer`, under `tag` from now on: say so to tables, counters and ring.

    `evicted`: the expert that leaves, -1 for none; `is_wasted`: 1 if it was prefetched for nothing.
    """
    column = tables.counters + key_layer * _COUNTERS
    if evicted >= 0:
        tl.store(tables.slot_of + evicted, -1)
        tl.atomic_add(column + _EVICTIONS, 1)
        tl.atomic_add(column + _WASTED, is_wasted)
    tl.atomic_add(column + _PREFETCHES, 1)
    tl.store(tables.slot_of + key, slot)
    tl.store(tables.slot_tag + slot, tag)
    tl.store(tables.is_unproven + slot, 1)
    entry = entry_address.to(tl.pointer_type(tl.int64))
    tl.store(entry, key.to(tl.int64))
    tl.store(entry + 1, slot.to(tl.int64))
    tl.store(entry + 2, tag)
    tl.store(entry + 3, deadline)
