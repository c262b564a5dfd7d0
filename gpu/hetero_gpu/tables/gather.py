"""Load what a layer misses, from the host bank into slabs, by one launch that asks no host.

    bank, mapped host memory      |record 0|record 1| ... |key k| ...
                                                             │ 32 KiB a step, 16 B a load
    slabs, device                 |slab 0|slab 1| ... |miss_slot[i]| ...

The device itself starts the loads (SeqMoE §8.2): `ensure` left (slot, key) pairs and their count in the
tables. A few programs stride over (miss, chunk): that already fills the link and leaves the GPU to others.
The last program to finish takes back the pause that `ensure` raised for the prefetch worker. A bank of packed
records is read by `gather_packed`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl

from hetero_gpu.control.memory_order import store_release
from hetero_gpu.mapped import device_address
from hetero_gpu.overlap import meet, overlap_options
from hetero_gpu.packed.layout import PackedLayout
from hetero_gpu.slabs import SlabPool
from hetero_gpu.tables.gather_packed import NUM_PROGRAMS as PACKED_PROGRAMS
from hetero_gpu.tables.gather_packed import gather_packed
from hetero_gpu.tables.state import COUNTERS, NUM_COUNTERS, DeviceTables
from hetero_gpu.zero_copy import NUM_PROGRAMS

_CHUNK_WORDS = 8192
_NUM_WARPS = 16
_BYTES = tl.constexpr(COUNTERS.index("bytes_moved"))
_COUNTERS = tl.constexpr(NUM_COUNTERS)


@dataclass(frozen=True)
class MappedBank:
    """All records in the order of their keys (layer * num_experts + expert), as the device addresses them.

    `record_bytes`: from one record to the next. `packing`: the layout of packed records; None: plain ones.
    """

    address: int
    record_bytes: int
    packing: PackedLayout | None = None

    def __post_init__(self) -> None:
        if self.address % 16 or self.record_bytes % 16:
            raise ValueError(
                f"a bank at {self.address:#x} with records of {self.record_bytes} bytes: "
                f"both must be multiples of 16"
            )
        if self.packing is not None and self.packing.packed_bytes != self.record_bytes:
            raise ValueError(
                f"records of {self.record_bytes} bytes, packed in a layout of {self.packing.packed_bytes}"
            )

    @property
    def slab_bytes(self) -> int:
        """Bytes that a record takes in its slab."""
        return self.record_bytes if self.packing is None else self.packing.plain_bytes

    @classmethod
    def of(cls, records: torch.Tensor, record_bytes: int, packing: PackedLayout | None = None) -> Self:
        """The bank `records` (host uint8, contiguous, registered with CUDA in any number of pieces).

        Raises RuntimeError when it is not registered, or when the device sees the pieces apart.
        """
        start = records.data_ptr()
        address = device_address(start)
        last = records.nbytes - record_bytes
        if device_address(start + last) != address + last:
            raise RuntimeError("the device maps the pieces of the registered bank apart; it needs one range")
        return cls(address, record_bytes, packing)


def gather(
    tables: DeviceTables,
    layer: int,
    *,
    bank: MappedBank,
    slabs: SlabPool,
    num_programs: int | None = None,
    is_late: bool = False,
) -> None:
    """Load the records that the last `ensure` (of `layer`) listed, or with `is_late` the last `await_late`.

    Asynchronous, capturable in a CUDA graph; what is submitted to the stream afterwards sees the bytes. Same
    result as `gather_reference`. `num_programs`: None takes as many as fill a PCIe 5 link.
    """
    if slabs.record_bytes != bank.slab_bytes or slabs.num_slabs != tables.num_slots:
        raise ValueError(
            f"{slabs.num_slabs} slabs of {slabs.record_bytes} bytes do not fit {tables.num_slots} slots and "
            f"records of {bank.slab_bytes}"
        )
    listed = (tables.miss_slot, tables.miss_key, tables.miss_count)
    if is_late:
        listed = (tables.late_slot, tables.late_key, tables.late_count)
    if bank.packing is not None:
        gather_packed(
            tables,
            layer,
            listed=listed,
            bank_address=bank.address,
            layout=bank.packing,
            slabs=slabs,
            num_programs=num_programs or PACKED_PROGRAMS,
        )
        return
    _gather_kernel[(num_programs or NUM_PROGRAMS,)](
        bank.address,
        slabs.memory.view(torch.int32),
        *listed,
        tables.programs_done,
        tables.counters,
        tables.pause_address,
        layer,
        RECORD_WORDS=bank.record_bytes // 4,
        CHUNK_WORDS=_CHUNK_WORDS,
        num_warps=_NUM_WARPS,
        **overlap_options(tables.device),
    )


def gather_reference(tables: DeviceTables, records: torch.Tensor, slabs: SlabPool) -> None:
    """What `gather` must leave in the slabs. `records`: plain, uint8 `[keys, record_bytes]`."""
    for i in range(int(tables.miss_count.item())):
        slabs.slab(int(tables.miss_slot[i])).copy_(records[int(tables.miss_key[i])])


@triton.jit(do_not_specialize=["bank_address", "pause_address", "layer"])  # type: ignore[untyped-decorator]
def _gather_kernel(  # type: ignore[no-untyped-def]
    bank_address,
    slabs,
    miss_slot,
    miss_key,
    miss_count,
    programs_done,
    counters,
    pause_address,
    layer,
    RECORD_WORDS: tl.constexpr,  # noqa: N803
    CHUNK_WORDS: tl.constexpr,  # noqa: N803
    OVERLAPS: tl.constexpr,  # noqa: N803
):
    meet(OVERLAPS)
    count = tl.load(miss_count)
    if count > 0:
        num_chunks = (RECORD_WORDS + CHUNK_WORDS - 1) // CHUNK_WORDS
        words = tl.arange(0, CHUNK_WORDS)
        step = tl.program_id(0)
        while step < count * num_chunks:
            miss = step // num_chunks
            offsets = (step % num_chunks) * CHUNK_WORDS + words
            record = tl.load(miss_key + miss).to(tl.int64) * RECORD_WORDS
            slab = tl.load(miss_slot + miss).to(tl.int64) * RECORD_WORDS
            source = (bank_address + record * 4).to(tl.pointer_type(tl.int32))
            loaded = tl.load(tl.multiple_of(source, 16) + offsets, mask=offsets < RECORD_WORDS)
            tl.store(slabs + slab + offsets, loaded, mask=offsets < RECORD_WORDS)
            step += tl.num_programs(0)
        is_last = tl.atomic_add(programs_done, 1) == tl.num_programs(0) - 1
        if is_last:
            tl.store(programs_done, 0)
            moved = counters + layer * _COUNTERS + _BYTES
            tl.atomic_add(moved, count.to(tl.int64) * (RECORD_WORDS * 4))
            store_release(pause_address, 0)
