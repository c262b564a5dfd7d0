"""Load what a layer misses from a bank of packed records: read at twelve bits an element, decoded on the way.

    bank, mapped host memory   |packed 0|packed 1| ... |packed k| ...
                                                          │ 24 KiB a step, and its few escapes
    slabs, device              |slab 0      |slab 1      | ... bf16

The bytes in flight over the link come from many programs, not from large steps: a step ends with two reads
that depend on each other, the table and then the escapes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hetero_gpu.control.memory_order import store_release
from hetero_gpu.overlap import meet, overlap_options
from hetero_gpu.packed.decode import NUM_WARPS, decode_chunk
from hetero_gpu.packed.layout import PackedLayout
from hetero_gpu.slabs import SlabPool
from hetero_gpu.tables.state import COUNTERS, NUM_COUNTERS, DeviceTables

NUM_PROGRAMS = 64
_BYTES = tl.constexpr(COUNTERS.index("bytes_moved"))
_COUNTERS = tl.constexpr(NUM_COUNTERS)


def gather_packed(
    tables: DeviceTables,
    layer: int,
    *,
    listed: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    bank_address: int,
    layout: PackedLayout,
    slabs: SlabPool,
    num_programs: int,
) -> None:
    """`gather` for packed records, which begin at `bank_address`. `listed`: slots, keys, count."""
    _gather_packed_kernel[(num_programs,)](
        bank_address,
        slabs.memory.data_ptr(),
        *listed,
        tables.programs_done,
        tables.counters,
        tables.pause_address,
        layer,
        NUM_CHUNKS=layout.num_chunks,
        PACKED_BYTES=layout.packed_bytes,
        NUM_ELEMENTS=layout.num_elements,
        CODES_AT=layout.codes_at,
        TABLE_AT=layout.table_at,
        ESCAPES_AT=layout.escapes_at,
        num_warps=NUM_WARPS,
        **overlap_options(tables.device),
    )


@triton.jit(do_not_specialize=["bank_address", "slabs_address", "pause_address", "layer"])  # type: ignore[untyped-decorator]
def _gather_packed_kernel(  # type: ignore[no-untyped-def]
    bank_address,
    slabs_address,
    miss_slot,
    miss_key,
    miss_count,
    programs_done,
    counters,
    pause_address,
    layer,
    NUM_CHUNKS: tl.constexpr,  # noqa: N803
    PACKED_BYTES: tl.constexpr,  # noqa: N803
    NUM_ELEMENTS: tl.constexpr,  # noqa: N803
    CODES_AT: tl.constexpr,  # noqa: N803
    TABLE_AT: tl.constexpr,  # noqa: N803
    ESCAPES_AT: tl.constexpr,  # noqa: N803
    OVERLAPS: tl.constexpr,  # noqa: N803
):
    meet(OVERLAPS)
    count = tl.load(miss_count)
    if count > 0:
        moved = tl.zeros((), tl.int64)
        step = tl.program_id(0)
        while step < count * NUM_CHUNKS:
            miss = step // NUM_CHUNKS
            packed = bank_address + tl.load(miss_key + miss).to(tl.int64) * PACKED_BYTES
            slab = slabs_address + tl.load(miss_slot + miss).to(tl.int64) * (NUM_ELEMENTS * 2)
            moved += decode_chunk(
                packed, slab, step % NUM_CHUNKS, NUM_ELEMENTS, CODES_AT, TABLE_AT, ESCAPES_AT
            )
            step += tl.num_programs(0)
        tl.atomic_add(counters + layer * _COUNTERS + _BYTES, moved)
        is_last = tl.atomic_add(programs_done, 1) == tl.num_programs(0) - 1
        if is_last:
            tl.store(programs_done, 0)
            store_release(pause_address, 0)
