"""Bring what a layer still lacks once its prefetches were awaited, from packed records, in one launch.

    bank, mapped host memory    late 0 | late 1 | ...       what `await_late` listed ─┐
                                                                                      ├─▶ slabs, bf16
    staging, device             landed 0 | landed 1 | ...   what `landing` listed ────┘

Both are chunks to decode and no slot is in both lists, so programs stride over one list after the other. The
last program to finish takes back the pause that `await_late` raised, and gives the worker its buffers back.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hetero_gpu.control.memory_order import store_release
from hetero_gpu.control.region import ControlRegion, Word
from hetero_gpu.overlap import meet, overlap_options
from hetero_gpu.packed.decode import NUM_WARPS, decode_chunk
from hetero_gpu.slabs import SlabPool
from hetero_gpu.tables.gather import MappedBank
from hetero_gpu.tables.state import COUNTERS, NUM_COUNTERS, DeviceTables

_NUM_PROGRAMS = 192
_BYTES = tl.constexpr(COUNTERS.index("bytes_moved"))
_COUNTERS = tl.constexpr(NUM_COUNTERS)


def unpack_landed(
    tables: DeviceTables,
    *,
    region: ControlRegion,
    staging: torch.Tensor,
    bank: MappedBank,
    slabs: SlabPool,
    late_layer: int | None = None,
) -> None:
    """Decode what landed in `staging` (uint8 `[buffers, packed_bytes]`) into its slabs, then let the worker
    use those buffers again. Once a layer, behind all else that takes note of landings.

    `late_layer`: the layer of the last `await_late`; what that listed is loaded too, in place of
    `gather(..., is_late=True)`. None: it listed nothing that is still to be loaded. Asynchronous, capturable;
    what is submitted afterwards sees the bytes. Raises ValueError for a bank of plain records.
    """
    layout = bank.packing
    if layout is None:
        raise ValueError("records of this bank are not packed: what landed lies in its slab already")
    _unpack_kernel[(_NUM_PROGRAMS,)](
        bank.address,
        staging.data_ptr(),
        slabs.memory.data_ptr(),
        tables.late_slot,
        tables.late_key,
        tables.late_count,
        tables.for_kernels,
        tables.landed_for_kernels,
        tables.num_consumed,
        tables.programs_done,
        region.address(Word.CONSUMED),
        tables.pause_address,
        0 if late_layer is None else late_layer,
        HAS_LATE=late_layer is not None,
        NUM_CHUNKS=layout.num_chunks,
        PACKED_BYTES=layout.packed_bytes,
        NUM_ELEMENTS=layout.num_elements,
        CODES_AT=layout.codes_at,
        TABLE_AT=layout.table_at,
        ESCAPES_AT=layout.escapes_at,
        num_warps=NUM_WARPS,
        **overlap_options(tables.device),
    )


_ADDRESSES = ["bank_address", "staging_address", "slabs_address", "consumed_address", "pause_address"]


@triton.jit(do_not_specialize=[*_ADDRESSES, "layer"])  # type: ignore[untyped-decorator]
def _unpack_kernel(  # type: ignore[no-untyped-def]
    bank_address,
    staging_address,
    slabs_address,
    late_slot,
    late_key,
    late_count,
    tables,
    landed,
    num_consumed,
    programs_done,
    consumed_address,
    pause_address,
    layer,
    HAS_LATE: tl.constexpr,  # noqa: N803
    NUM_CHUNKS: tl.constexpr,  # noqa: N803
    PACKED_BYTES: tl.constexpr,  # noqa: N803
    NUM_ELEMENTS: tl.constexpr,  # noqa: N803
    CODES_AT: tl.constexpr,  # noqa: N803
    TABLE_AT: tl.constexpr,  # noqa: N803
    ESCAPES_AT: tl.constexpr,  # noqa: N803
    OVERLAPS: tl.constexpr,  # noqa: N803
):
    meet(OVERLAPS)
    num_packed = tl.load(landed.number)
    num_late = tl.load(late_count) if HAS_LATE else num_packed * 0
    num_records = num_late + num_packed
    is_last = tl.program_id(0) == 0
    if num_records > 0:
        moved = tl.zeros((), tl.int64)
        step = tl.program_id(0)
        while step < num_records * NUM_CHUNKS:
            i = step // NUM_CHUNKS
            is_late = i < num_late
            if is_late:
                slot = tl.load(late_slot + i).to(tl.int64)
                packed = bank_address + tl.load(late_key + i).to(tl.int64) * PACKED_BYTES
                is_wanted = is_late
            else:
                slot = tl.load(landed.slot + i - num_late).to(tl.int64)
                packed = staging_address + tl.load(landed.buffer + i - num_late).to(tl.int64) * PACKED_BYTES
                # `ensure` may have given it away since
                is_wanted = tl.load(tables.slot_tag + slot) == tl.load(landed.tag + i - num_late)
            if is_wanted:
                slab = slabs_address + slot * (NUM_ELEMENTS * 2)
                num_bytes = decode_chunk(
                    packed, slab, step % NUM_CHUNKS, NUM_ELEMENTS, CODES_AT, TABLE_AT, ESCAPES_AT
                )
                moved += tl.where(is_late, num_bytes, 0)
            step += tl.num_programs(0)
        tl.atomic_add(tables.counters + layer * _COUNTERS + _BYTES, moved, mask=moved > 0)
        is_last = tl.atomic_add(programs_done, 1) == tl.num_programs(0) - 1
    if is_last:
        num_now = tl.load(tables.num_landed)
        num_before = tl.load(num_consumed)
        tl.debug_barrier()  # all threads go on with one answer
        if num_records > 0:
            tl.store(programs_done, 0)
            tl.store(landed.number, 0)
        if num_now != num_before:  # what landed for nobody leaves its buffer too
            tl.store(num_consumed, num_now)
            store_release(consumed_address, num_now)
        if num_late > 0:
            store_release(pause_address, 0)
