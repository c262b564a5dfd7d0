"""Make the experts that a layer needs present: the decisions of one layer, by one thread block.

    requested = the experts in top_k_index, each once
    eviction score observes
    COMPUTE slots of the layer → USED
    for every requested expert without a slot, ascending:
        slot = first EMPTY, else least score among USED, unpinned, not requested; ties to the lowest slot
        evict what it held; → COMPUTE under a new tag; onto the miss list
    COMPUTE slots of the layer → USED          (SeqMoE §7.2: immediately before its experts run)
    slot_of_pair = slot of each pair

Step for step what `hetero_scheduler.SlotMachine` does; the tests hold both to the same sequences. Nothing is
allocated and the host reads nothing, so a launch can be captured in a CUDA graph. `gather` must follow.

With `landings`, what `land` does comes first, in the same launch: what has landed is a hit. With `running`,
a layer begins for whom `Windows` foresee, before that is decided. With `dividing`, some misses go to the CPU,
which is called at once, and all that follows is about the others.

A requested expert whose prefetch is still under way keeps its FETCH slot. Either it is gathered into it at
once: both writers bring the same bytes, and the slot stays out of reach until the worker reports it. Or, with
`awaits_late`, `await_late` is to follow.

Every read of a word that this kernel also writes lies before a barrier that precedes the write: threads of
several warps hold copies of the same scalar.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hetero_gpu.control.fault import TableError
from hetero_gpu.control.memory_order import store_release
from hetero_gpu.in_place import call_cpu
from hetero_gpu.overlap import meet, overlap_options
from hetero_gpu.tables.divide import Dividing, divide_layer, division_arguments
from hetero_gpu.tables.landing import Landings, begin_layer, landing_arguments
from hetero_gpu.tables.observe import observed, policy_number
from hetero_gpu.tables.state import COUNTERS, NUM_COUNTERS, DeviceTables
from hetero_gpu.tables.windows import RUN, Running, score_layer, window_arguments, window_sizes
from hetero_scheduler import SlotState

_EMPTY = tl.constexpr(int(SlotState.EMPTY))
_FETCH = tl.constexpr(int(SlotState.FETCH))
_COMPUTE = tl.constexpr(int(SlotState.COMPUTE))
_USED = tl.constexpr(int(SlotState.USED))
_NO_SLOT_ERROR = tl.constexpr(int(TableError.NO_SLOT))
_BAD_EXPERT_ERROR = tl.constexpr(int(TableError.BAD_EXPERT))
_COUNTERS = tl.constexpr(NUM_COUNTERS)
_REQUIRED, _HITS = tl.constexpr(COUNTERS.index("required")), tl.constexpr(COUNTERS.index("hits"))
_LATE, _MISSES = tl.constexpr(COUNTERS.index("late")), tl.constexpr(COUNTERS.index("misses"))
_PROVEN = tl.constexpr(COUNTERS.index("hits_prefetched"))
_WASTED = tl.constexpr(COUNTERS.index("prefetches_wasted"))
_STALLS = tl.constexpr(COUNTERS.index("stalls"))
_LOADS, _EVICTIONS = tl.constexpr(COUNTERS.index("loads")), tl.constexpr(COUNTERS.index("evictions"))


def ensure(
    tables: DeviceTables,
    layer: int,
    top_k_index: torch.Tensor,
    *,
    awaits_late: bool = False,
    landings: Landings | None = None,
    running: Running | None = None,
    dividing: Dividing | None = None,
) -> torch.Tensor:
    """Decide where each expert of `top_k_index` (integer `[T, K]`, contiguous) lies or will be loaded.

    Returns slots, int32 `[T, K]`, a view into the tables that the next `ensure` overwrites; the experts are
    there once `gather` has run, and with `awaits_late` also `await_late` and what follows it. An index below
    0 is a pair to skip: its slot is -1. If a load finds no slot, its pairs get -1 and the error word says so.
    Each layer of a pass calls this once, in order. `landings`: None where `land` was called, or nothing is
    prefetched. `running`: None where nothing is foreseen. `dividing`: None where the device brings all; the
    slots of what the CPU computes are -1, and `Calls.add_answer` must follow.
    """
    num_pairs = top_k_index.numel()
    sizes = tables.layer_sizes(num_pairs)
    if not top_k_index.is_contiguous() or top_k_index.is_floating_point():
        raise ValueError("top_k_index must be contiguous integers")
    _ensure_kernel[(1,)](
        top_k_index,
        tables.slot_of_pair,
        tables.for_kernels,
        tables.miss_slot,
        tables.miss_key,
        tables.miss_count,
        tables.error_address,
        tables.pause_address,
        layer,
        *landing_arguments(tables, landings),
        *window_arguments(running),
        *division_arguments(dividing),
        **sizes,
        **window_sizes(running, top_k_index.shape[-1]),
        LANDS=landings is not None,
        RING=1 if landings is None else landings.region.ring_size,
        IS_STAGED=landings is not None and landings.is_staged,
        DIVIDES=dividing is not None,
        AWAITS_LATE=awaits_late,
        POLICY=policy_number(tables.policy),
        HALF_LIFE=tables.half_life,
        num_warps=tables.num_warps,
        enable_fp_fusion=False,  # scores round as the host's do
        **overlap_options(tables.device),
    )
    return tables.slot_of_pair[:num_pairs].view(top_k_index.shape)


_ADDRESSES = [
    "error_address",
    "pause_address",
    "landings_address",
    "landing_tail_address",
    "position_address",
]


@triton.jit(do_not_specialize=[*_ADDRESSES, "record_bytes", "layer"])  # type: ignore[untyped-decorator]
def _ensure_kernel(  # type: ignore[no-untyped-def]
    top_k_index,
    slot_of_pair,
    tables,
    miss_slot,
    miss_key,
    miss_count,
    error_address,
    pause_address,
    layer,
    landed,
    patience,
    landings_address,
    landing_tail_address,
    position_address,
    record_bytes,
    windows,
    active,
    hidden,
    weights,
    kept,
    number_of,
    calls,
    NUM_PAIRS: tl.constexpr,  # noqa: N803
    NUM_SLOTS: tl.constexpr,  # noqa: N803
    NUM_LAYERS: tl.constexpr,  # noqa: N803
    NUM_EXPERTS: tl.constexpr,  # noqa: N803
    PAIR_BLOCK: tl.constexpr,  # noqa: N803
    SLOT_BLOCK: tl.constexpr,  # noqa: N803
    LAYER_BLOCK: tl.constexpr,  # noqa: N803
    EXPERT_BLOCK: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    HORIZON: tl.constexpr,  # noqa: N803
    NUM_STEPPING: tl.constexpr,  # noqa: N803
    TOP_K: tl.constexpr,  # noqa: N803
    CHOSEN_BLOCK: tl.constexpr,  # noqa: N803
    LANDS: tl.constexpr,  # noqa: N803
    RING: tl.constexpr,  # noqa: N803
    IS_STAGED: tl.constexpr,  # noqa: N803
    DIVIDES: tl.constexpr,  # noqa: N803
    AWAITS_LATE: tl.constexpr,  # noqa: N803
    POLICY: tl.constexpr,  # noqa: N803
    HALF_LIFE: tl.constexpr,  # noqa: N803
    OVERLAPS: tl.constexpr,  # noqa: N803
):
    meet(OVERLAPS)
    if LANDS:
        begin_layer(
            tables, landed, patience, landings_address, landing_tail_address, position_address, record_bytes,
            error_address, RING, NUM_SLOTS, NUM_EXPERTS, IS_STAGED,
        )  # fmt: skip
        tl.debug_barrier()
    if ROWS > 0:
        score_layer(
            windows, active, top_k_index, tables.score, layer, ROWS, HORIZON, NUM_STEPPING, TOP_K,
            CHOSEN_BLOCK, NUM_LAYERS, NUM_EXPERTS, EXPERT_BLOCK, RUN,
        )  # fmt: skip
        tl.debug_barrier()
    brought = top_k_index
    if DIVIDES:
        divide_layer(
            layer, top_k_index, weights, kept, number_of, calls, tables, NUM_PAIRS, NUM_SLOTS, NUM_LAYERS,
            NUM_EXPERTS, PAIR_BLOCK, SLOT_BLOCK, LAYER_BLOCK, EXPERT_BLOCK, POLICY, HALF_LIFE,
        )  # fmt: skip
        tl.debug_barrier()
        call_cpu(layer, hidden, weights, calls, NUM_PAIRS, PAIR_BLOCK)
        brought = kept
    # ---- read
    experts = tl.arange(0, EXPERT_BLOCK)
    row = layer * NUM_EXPERTS + experts
    is_expert = experts < NUM_EXPERTS
    pairs = tl.arange(0, PAIR_BLOCK)
    wanted = tl.load(brought + pairs, mask=pairs < NUM_PAIRS, other=-1).to(tl.int32)
    is_wanted = experts[:, None] == wanted[None, :]  # [EXPERT_BLOCK, PAIR_BLOCK]
    is_requested = (tl.max(is_wanted.to(tl.int32), axis=1) > 0) & is_expert
    slot = tl.load(tables.slot_of + row, mask=is_expert, other=-1)
    has_slot = slot >= 0
    state = tl.load(tables.slot_state + slot, mask=has_slot, other=_EMPTY)
    filled = tl.load(tables.is_filled + slot, mask=has_slot, other=0)
    unproven = tl.load(tables.is_unproven + slot, mask=has_slot, other=0)
    old_score = tl.load(tables.score + row, mask=is_expert, other=0.0)
    layers = tl.arange(0, LAYER_BLOCK)
    passes_of = tl.load(tables.clock + layers, mask=layers < NUM_LAYERS, other=0)
    passes = tl.sum(tl.where(layers == layer, passes_of, 0), axis=0) + 1
    now = tl.load(tables.position) + 1
    tag = tl.load(tables.next_tag)
    columns = tl.arange(0, _COUNTERS)
    counted = tl.load(tables.counters + layer * _COUNTERS + columns)
    pool_start = tl.load(tables.pools + 2 * layer)
    pool_end = tl.load(tables.pools + 2 * layer + 1)
    tl.debug_barrier()

    # ---- observe
    new_score = observed(old_score, passes, tl.sum(passes_of, axis=0) + 1, POLICY, HALF_LIFE)
    tl.store(tables.score + row, new_score, mask=is_requested)
    tl.store(tables.clock + layer, passes)
    tl.store(tables.position, now)
    tl.store(tables.slot_last + slot, now, mask=is_requested & has_slot)
    tl.store(tables.is_unproven + slot, tl.zeros_like(unproven), mask=is_requested & has_slot)

    # ---- decide
    is_absent = is_requested & (slot < 0)
    is_late = is_requested & (state == _FETCH) & (filled == 0)
    num_absent = tl.sum(is_absent.to(tl.int32), axis=0)
    num_late = tl.sum(is_late.to(tl.int32), axis=0)
    num_listed = num_late * 0
    num_evicted = num_late * 0
    num_wasted = num_late * 0
    num_proven = tl.sum((is_requested & has_slot & (unproven != 0) & (is_late == 0)).to(tl.int32), axis=0)
    is_pending, num_pending = is_absent, num_absent
    if not AWAITS_LATE:
        is_pending, num_pending = is_absent | is_late, num_absent + num_late
    if num_pending == 0:
        tl.store(tables.slot_state + slot, _USED, mask=state == _COMPUTE)
    else:
        slot, num_listed, num_evicted, num_wasted, tag = _place(
            slot, is_pending, layer, now, tag, pool_start, pool_end, tables, miss_slot, miss_key,
            NUM_SLOTS, NUM_EXPERTS, SLOT_BLOCK, EXPERT_BLOCK,
        )  # fmt: skip
        tl.store(tables.next_tag, tag)
        tl.store(tables.slot_of + row, slot, mask=is_expert)

    # ---- tell
    tl.store(
        slot_of_pair + pairs, tl.max(tl.where(is_wanted, slot[:, None], -1), axis=0), mask=pairs < NUM_PAIRS
    )
    tl.store(miss_count, num_listed)
    num_requested = tl.sum(is_requested.to(tl.int32), axis=0)
    counted += tl.where(columns == _REQUIRED, num_requested, 0)
    counted += tl.where(columns == _HITS, num_requested - num_absent - num_late, 0)
    counted += tl.where(columns == _LATE, num_late, 0)
    counted += tl.where(columns == _MISSES, num_absent, 0)
    counted += tl.where(columns == _LOADS, num_listed, 0)
    counted += tl.where(columns == _EVICTIONS, num_evicted, 0)
    counted += tl.where(columns == _PROVEN, num_proven, 0)
    counted += tl.where(columns == _WASTED, num_wasted, 0)
    counted += tl.where((columns == _STALLS) & (num_absent + num_late > 0), 1, 0)
    tl.store(tables.counters + layer * _COUNTERS + columns, counted)
    if num_listed > 0:
        store_release(pause_address, 1)
    if num_listed < num_pending:
        store_release(error_address, _NO_SLOT_ERROR)
    if tl.max(wanted, axis=0) >= NUM_EXPERTS:
        store_release(error_address, _BAD_EXPERT_ERROR)


@triton.jit  # type: ignore[untyped-decorator]
def _place(  # type: ignore[no-untyped-def]
    slot,
    is_pending,
    layer,
    now,
    tag,
    pool_start,
    pool_end,
    tables,
    miss_slot,
    miss_key,
    NUM_SLOTS: tl.constexpr,  # noqa: N803
    NUM_EXPERTS: tl.constexpr,  # noqa: N803
    SLOT_BLOCK: tl.constexpr,  # noqa: N803
    EXPERT_BLOCK: tl.constexpr,  # noqa: N803
):
    """Give each pending expert of the layer a slot and list it.

    Returns (slot, num_listed, num_evicted, num_wasted, tag).
    """
    tl.debug_barrier()  # the marks in slot_last are there
    experts = tl.arange(0, EXPERT_BLOCK)
    slots = tl.arange(0, SLOT_BLOCK)
    is_slot = slots < NUM_SLOTS
    key = tl.load(tables.slot_key + slots, mask=is_slot, other=-1)
    state = tl.load(tables.slot_state + slots, mask=is_slot, other=_FETCH)
    state = tl.where((state == _COMPUTE) & (key // NUM_EXPERTS == layer), _USED, state)
    last = tl.load(tables.slot_last + slots, mask=is_slot, other=0)
    pinned = tl.load(tables.is_pinned + slots, mask=is_slot, other=1)
    unproven = tl.load(tables.is_unproven + slots, mask=is_slot, other=0).to(tl.int32)
    in_pool = (slots >= pool_start) & (slots < pool_end)
    is_evictable = in_pool & (state == _USED) & (pinned == 0) & (last != now)
    rank = tl.load(tables.score + key, mask=is_evictable, other=float("inf"))
    tl.debug_barrier()

    num_left = tl.sum(is_pending.to(tl.int32), axis=0)
    num_listed = num_left * 0
    num_evicted = num_left * 0
    num_wasted = num_left * 0
    while num_left > 0:
        expert = tl.min(tl.where(is_pending, experts, EXPERT_BLOCK), axis=0)
        is_this = experts == expert
        is_pending = is_pending & (experts != expert)
        num_left -= 1
        chosen = tl.max(tl.where(is_this, slot, -1), axis=0)
        if chosen >= 0:
            tl.store(tables.is_filled + chosen, 1)
        else:
            first_empty = tl.min(tl.where(in_pool & (state == _EMPTY), slots, SLOT_BLOCK), axis=0)
            least, least_slot = tl.min(rank, axis=0, return_indices=True)
            if first_empty < SLOT_BLOCK:
                chosen = first_empty
            elif least < float("inf"):
                chosen = least_slot
                evicted = tl.load(tables.slot_key + chosen)  # slot_key is written after the loop
                tl.store(tables.slot_of + evicted, -1)
                slot = tl.where(layer * NUM_EXPERTS + experts == evicted, -1, slot)
                num_evicted += 1
                num_wasted += tl.max(tl.where(slots == chosen, unproven, 0), axis=0)
            if chosen >= 0:
                is_chosen = slots == chosen
                rank = tl.where(is_chosen, float("inf"), rank)
                state = tl.where(is_chosen, _USED, state)  # COMPUTE, and released with its layer
                key = tl.where(is_chosen, layer * NUM_EXPERTS + expert, key)
                slot = tl.where(is_this, chosen, slot)
                tl.store(tables.slot_tag + chosen, tag)
                tl.store(tables.slot_last + chosen, now)
                tl.store(tables.is_unproven + chosen, 0)
                tag += 1
        if chosen >= 0:
            tl.store(miss_slot + num_listed, chosen)
            tl.store(miss_key + num_listed, layer * NUM_EXPERTS + expert)
            num_listed += 1
    tl.debug_barrier()
    tl.store(tables.slot_key + slots, key, mask=is_slot)
    tl.store(tables.slot_state + slots, state, mask=is_slot)
    return slot, num_listed, num_evicted, num_wasted, tag
