"""A slower link than the machine's, for a captured step: whatever crosses it brings other bytes with it.

    device-initiated load   read other records ─ read what is missed          one stream, one after the other
    copy of a prefetch      copy other bytes to nowhere ─ copy the record     the worker's stream
                            ◄── as many as make both together as slow as wanted ──►

The link is loaded for as long as the slower one would be, so what shares it waits as it would there: a clock
that only delayed each transfer would let two of them pass at full speed side by side. Prompts are not slowed.
The product knows nothing of this: the two functions that it calls are exchanged from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self
from unittest.mock import patch

import numba
import numpy as np
import torch
import triton
import triton.language as tl
from numba import types

from bench.harness import measure
from hetero_gpu import SlabPool
from hetero_gpu.control import CopyEngine
from hetero_gpu.control.host_atomics import call_copy, load_acquire
from hetero_gpu.tables import DeviceTables, MappedBank, gather, unpack_landed
from hetero_runtime.orchestrator import captured_prefetch
from hetero_runtime.orchestrator import device as device_orchestrator

_CHUNK_WORDS, _NUM_WARPS, _NUM_PROGRAMS = 8192, 16, 8
_PROBED = 8
"""Records that a rate is measured with."""
_EXTRA, _REAL_COPY, _NOWHERE = range(3)

Gather = Callable[..., None]


@dataclass(frozen=True)
class ExtraBytes:
    """What is carried beside each record."""

    load: int
    copy: int


@dataclass(frozen=True)
class LinkRates:
    """GB/s (10^9 bytes) at which records cross: loaded by the device, copied, and just read by a kernel."""

    load: float
    copy: float
    read: float

    @classmethod
    def of(
        cls,
        records: torch.Tensor,
        bank: MappedBank,
        shape: tuple[int, int],
        device: torch.device,
        *,
        load: Gather = gather,
    ) -> Self:
        """`records`: the host bank, uint8; `bank`: the same as the device sees it; `shape`: its layers and
        experts a layer; `load`: what loads. Takes some milliseconds and room for a few records."""
        probe = _Probe(records, bank, shape, device)
        return cls(probe.load_gb_s(load), probe.copy_gb_s(), probe.read_gb_s())

    def slowed_to(self, gb_s: float, record_bytes: int) -> ExtraBytes:
        """What makes records of `record_bytes` cross at `gb_s`. Raises ValueError where they are slower."""
        if min(self.load, self.copy) < gb_s:
            raise ValueError(
                f"a link of {self.load:.1f} and {self.copy:.1f} GB/s cannot be slowed to {gb_s:g}"
            )
        load = record_bytes * (1 / gb_s - 1 / self.load) * self.read
        copy = record_bytes * (self.copy / gb_s - 1)
        return ExtraBytes(_in_words(load), _in_words(copy))


class SlowLink:
    """Makes the link of one engine slower, once `slow` is called.

    Load the engine inside `wired`, so that its prefetch worker copies through here; `slowed` is for capturing
    its step anew.
    """

    def __init__(self) -> None:
        self._state = np.zeros(3, dtype=np.int64)
        self._kept: list[object] = []

    @contextmanager
    def wired(self) -> Iterator[None]:
        """Copy engines that are made inside carry extra bytes, none at first."""
        real = CopyEngine.cuda

        def cuda(device: torch.device) -> CopyEngine:
            return self.through(real(device))

        with patch.object(CopyEngine, "cuda", cuda):
            yield

    def through(self, engine: CopyEngine) -> CopyEngine:
        """`engine`, with what is to be carried besides."""
        self._state[_REAL_COPY] = engine.copy
        copier = _make_copier(self._state.ctypes.data)
        return replace(engine, copy=copier.address, keep=(engine, copier, self._state))

    @contextmanager
    def slowed(self, extra: ExtraBytes, record_bytes: int, device: torch.device) -> Iterator[None]:
        """Inside, copies are slower at once, and loads of a step that is captured inside are for ever."""
        nowhere = torch.empty(record_bytes, dtype=torch.uint8, device=device)
        self._kept.append(nowhere)
        self._state[_NOWHERE], self._state[_EXTRA] = nowhere.data_ptr(), extra.copy
        slow = slow_gather(extra.load)
        try:
            with ExitStack() as patches:
                for module in (device_orchestrator, captured_prefetch):
                    patches.enter_context(patch.object(module, "gather", slow))
                unpack = slow_unpack(extra.load)
                patches.enter_context(patch.object(captured_prefetch, "unpack_landed", unpack))
                yield
        finally:
            self._state[_EXTRA] = 0


def slow_gather(extra_bytes: int) -> Gather:
    """`gather` that first reads `extra_bytes` of other records for each that is missed."""

    def slow(
        tables: DeviceTables, layer: int, *, bank: MappedBank, slabs: SlabPool, is_late: bool = False
    ) -> None:
        listed = (tables.late_key, tables.late_count) if is_late else (tables.miss_key, tables.miss_count)
        num_keys = tables.num_layers * tables.num_experts
        read_besides(bank, *listed, num_keys=num_keys, extra_bytes=extra_bytes)
        gather(tables, layer, bank=bank, slabs=slabs, is_late=is_late)

    return slow


def slow_unpack(extra_bytes: int) -> Gather:
    """`unpack_landed`, likewise for each record that is late."""

    def slow(tables: DeviceTables, *, bank: MappedBank, late_layer: int | None = None, **others: Any) -> None:
        if late_layer is not None:
            num_keys = tables.num_layers * tables.num_experts
            listed = (tables.late_key, tables.late_count)
            read_besides(bank, *listed, num_keys=num_keys, extra_bytes=extra_bytes)
        unpack_landed(tables, bank=bank, late_layer=late_layer, **others)

    return slow


def read_besides(
    bank: MappedBank, keys: torch.Tensor, count: torch.Tensor, *, num_keys: int, extra_bytes: int
) -> torch.Tensor:
    """For each of the first `count` (int32 `[1]`) of `keys`, read `extra_bytes` of the bank that lie
    elsewhere, so that no cache has them. Device work alone.

    Returns words that depend on all that was read. Raises ValueError for a bank that has not so many bytes.
    """
    span = -(-extra_bytes // bank.record_bytes)
    if span > num_keys:
        raise ValueError(f"{extra_bytes} bytes of {num_keys} records of {bank.record_bytes}")
    sums = torch.empty((_NUM_PROGRAMS, _CHUNK_WORDS), dtype=torch.int32, device=keys.device)
    if extra_bytes:
        _read_kernel[(_NUM_PROGRAMS,)](
            bank.address,
            keys,
            count,
            sums,
            num_keys - span + 1,
            RECORD_WORDS=bank.record_bytes // 4,
            EXTRA_WORDS=extra_bytes // 4,
            CHUNK_WORDS=_CHUNK_WORDS,
            num_warps=_NUM_WARPS,
        )
    return sums


class _Probe:
    """A few records on their way, by each of the ways, into slabs that nobody needs."""

    def __init__(
        self, records: torch.Tensor, bank: MappedBank, shape: tuple[int, int], device: torch.device
    ) -> None:
        num_layers, num_experts = shape
        self._bank, self._device, self._num_keys = bank, device, num_layers * num_experts
        self._records = records.view(self._num_keys, bank.record_bytes)
        self._slabs = SlabPool(_PROBED, bank.slab_bytes, device)
        self._landing = torch.empty((_PROBED, bank.record_bytes), dtype=torch.uint8, device=device)
        self._tables = DeviceTables(
            num_slots=_PROBED,
            num_layers=num_layers,
            num_experts=num_experts,
            max_pairs=_PROBED,
            device=device,
        )
        slots = torch.arange(_PROBED, dtype=torch.int32, device=device)
        self._tables.miss_slot.copy_(slots)
        self._tables.miss_key.copy_(slots * self._num_keys // _PROBED)
        self._tables.miss_count.fill_(_PROBED)

    def load_gb_s(self, load: Gather) -> float:
        return self._gb_s(lambda: load(self._tables, 0, bank=self._bank, slabs=self._slabs))

    def copy_gb_s(self) -> float:
        keys = self._tables.miss_key.tolist()

        def copy() -> None:
            for place, key in enumerate(keys):
                self._landing[place].copy_(self._records[key], non_blocking=True)

        return self._gb_s(copy)

    def read_gb_s(self) -> float:
        tables, size = self._tables, self._bank.record_bytes
        return self._gb_s(
            lambda: read_besides(
                self._bank, tables.miss_key, tables.miss_count, num_keys=self._num_keys, extra_bytes=size
            )
        )

    def _gb_s(self, work: Callable[[], object]) -> float:
        wait = partial(torch.cuda.synchronize, self._device) if self._device.type == "cuda" else None
        seconds = measure(work, num_warmups=2, synchronize=wait).median
        return _PROBED * self._bank.record_bytes / seconds / 1e9


def _in_words(num_bytes: float) -> int:
    """To the nearest multiple of the sixteen bytes that one load takes."""
    return 16 * round(num_bytes / 16)


def _make_copier(state: int) -> Any:
    """A function of the shape of cudaMemcpyAsync that calls the real one, first for the extra bytes."""

    @numba.cfunc(types.int32(types.int64, types.int64, types.int64, types.int32, types.int64))
    def copy(to, source, num_bytes, kind, stream):  # type: ignore[no-untyped-def]
        real, left = load_acquire(state + 8 * _REAL_COPY), load_acquire(state + 8 * _EXTRA)
        while left > 0:
            part = min(left, num_bytes)
            code = call_copy(real, load_acquire(state + 8 * _NOWHERE), source, part, stream)
            if code != 0:
                return code
            left -= part
        return call_copy(real, to, source, num_bytes, stream)

    return copy


@triton.jit(do_not_specialize=["bank_address", "num_places"])  # type: ignore[untyped-decorator]
def _read_kernel(  # type: ignore[no-untyped-def]
    bank_address,
    keys,
    count,
    sums,
    num_places,
    RECORD_WORDS: tl.constexpr,  # noqa: N803
    EXTRA_WORDS: tl.constexpr,  # noqa: N803
    CHUNK_WORDS: tl.constexpr,  # noqa: N803
):
    num_missed = tl.load(count)
    num_chunks = (EXTRA_WORDS + CHUNK_WORDS - 1) // CHUNK_WORDS
    words = tl.arange(0, CHUNK_WORDS)
    total = tl.zeros((CHUNK_WORDS,), tl.int32)
    step = tl.program_id(0)
    while step < num_missed * num_chunks:
        key = tl.load(keys + step // num_chunks)
        place = ((key + num_places // 2) % num_places).to(tl.int64)
        offsets = (step % num_chunks) * CHUNK_WORDS + words
        source = (bank_address + place * (RECORD_WORDS * 4)).to(tl.pointer_type(tl.int32))
        total += tl.load(tl.multiple_of(source, 16) + offsets, mask=offsets < EXTRA_WORDS, other=0)
        step += tl.num_programs(0)
    if num_missed > 0:
        tl.store(sums + tl.program_id(0) * CHUNK_WORDS + words, total)
