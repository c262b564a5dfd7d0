"""Packing a filled bank in place: twelve bits an element instead of sixteen, every bit kept.

    before   |record 0   |record 1   |record 2   |record 3   | ...
    after    |packed 0|packed 1|packed 2|packed 3| ...        | given back to the system

Records are packed in waves. A wave whose packed records end before its plain ones begin is written straight
to its place: what lies there was packed before. The first waves go through a small scratch. Before anything
is overwritten every record is measured, so a bank that cannot be packed is left as it is. The compiled packer
is imported when it is needed: numba takes a while.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hetero_gpu.packed import PackedLayout
from hetero_runtime.experts.bank import HostBank
from hetero_runtime.experts.record import RecordLayout

_Bytes = npt.NDArray[np.uint8]


def packing_of(layout: RecordLayout) -> PackedLayout | None:
    """How records of `layout` are packed; None where they are not all bf16, or too small to gain by it."""
    if any(field.dtype != torch.bfloat16 for field in layout.fields):
        return None
    return PackedLayout.of(layout.record_bytes)


def pack_bank(
    bank: HostBank, packing: PackedLayout, *, threads: int, progress: Callable[[int], None]
) -> bool:
    """Pack the plain records that fill `bank`, and shrink it to what they take.

    `progress` is called with the plain bytes packed so far. False, with nothing changed, when some record
    has more escapes than its packed form has room for. An exception leaves the bank of no use.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix="expert-pack")
    try:
        tables = _measure(bank, packing, pool)
        if tables is None:
            return False
        for num_packed in _pack_in_waves(bank, packing, tables, pool=pool, wave_size=threads):
            progress(num_packed * packing.plain_bytes)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    bank.shrink(len(tables) * packing.packed_bytes)
    return True


class _Wave(NamedTuple):
    """Records `begin` to `end`. `is_in_place`: their packed forms end before their plain ones begin."""

    begin: int
    end: int
    is_in_place: bool


def _measure(
    bank: HostBank, packing: PackedLayout, pool: ThreadPoolExecutor
) -> npt.NDArray[np.uint32] | None:
    """The chunk tables of all records, uint32 `[records, num_chunks + 1]`; None when one does not fit."""
    from hetero_gpu.packed.pack import measure

    records = _rows(bank, packing.plain_bytes)
    tables = np.empty((len(records), packing.num_chunks + 1), dtype=np.uint32)
    counts = pool.map(measure, records, tables)
    return tables if all(num_escapes <= packing.capacity for num_escapes in counts) else None


def _pack_in_waves(
    bank: HostBank,
    packing: PackedLayout,
    tables: npt.NDArray[np.uint32],
    *,
    pool: ThreadPoolExecutor,
    wave_size: int,
) -> Iterator[int]:
    """Pack all records; yields how many are packed, after each wave."""
    from hetero_gpu.packed.pack import encode

    plain, packed = (_rows(bank, size) for size in (packing.plain_bytes, packing.packed_bytes))
    scratch = np.empty((wave_size, packing.packed_bytes), dtype=np.uint8)
    for wave in _waves(len(tables), packing, wave_size):
        target = packed[wave.begin : wave.end] if wave.is_in_place else scratch[: wave.end - wave.begin]
        jobs = [
            pool.submit(encode, plain[i], target[i - wave.begin], table=tables[i], layout=packing)
            for i in range(wave.begin, wave.end)
        ]
        for job in jobs:
            job.result()
        if not wave.is_in_place:
            _copy(pool, target, packed[wave.begin : wave.end])
        yield wave.end


def _waves(num_records: int, packing: PackedLayout, least: int) -> Iterable[_Wave]:
    """Waves of `least` records through scratch, until waves in place are as large as that."""
    begin = 0
    while begin < num_records:
        end = begin * packing.plain_bytes // packing.packed_bytes
        is_in_place = end >= min(begin + least, num_records)
        end = min(end if is_in_place else begin + least, num_records)
        yield _Wave(begin, end, is_in_place)
        begin = end


def _copy(pool: ThreadPoolExecutor, source: _Bytes, target: _Bytes) -> None:
    for _ in pool.map(np.copyto, target, source):
        pass


def _rows(bank: HostBank, row_bytes: int) -> _Bytes:
    """The bank as rows of `row_bytes`, without what is left over."""
    whole: _Bytes = bank.bytes.numpy()
    num_rows = len(whole) // row_bytes
    return whole[: num_rows * row_bytes].reshape(num_rows, row_bytes)
