"""How fast experts reach the device: copies from pinned and pageable memory, and reads by a kernel.

Every number is taken as the runtime moves experts: whole records, one after another, from a buffer that
no cache holds. Times come from CUDA events, the median of several passes.
"""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hetero_gpu.host_memory import register

RECORD_BYTES = 9_437_184
"""One bf16 expert of Qwen3-30B-A3B: 3 matrices of 2048 × 768."""
_DEVICE_PASSES = 8


@dataclass(frozen=True)
class LinkFacts:
    """GB/s (10^9 bytes) of each way to the device; None where there is none, and then `refusals` says why."""

    pinned: float | None = None
    """Copies from registered host memory."""
    pageable: float | None = None
    """Copies from host memory that is not registered."""
    zero_copy: float | None = None
    """Reads of registered host memory by a kernel of few thread blocks."""
    device_copy: float | None = None
    """Copies within the device, reads and writes counted."""
    registration: float | None = None
    """Registering filled host memory with CUDA."""
    refusals: tuple[str, ...] = ()


def measure_link(
    device: torch.device | str = "cuda",
    *,
    record_bytes: int = RECORD_BYTES,
    num_records: int = 16,
    repeats: int = 7,
) -> LinkFacts:
    """Measure the link of one CUDA device in about a second; takes 2 × num_records × record_bytes of it.

    `record_bytes` is a multiple of 16. A machine without CUDA is a fact, not an error. Raises
    torch.OutOfMemoryError when the device has no room for the measurement.
    """
    if not torch.cuda.is_available():
        return LinkFacts(refusals=("no CUDA device",))
    if record_bytes % 16:
        raise ValueError(f"record_bytes={record_bytes} must be a multiple of 16")
    with torch.cuda.device(device):
        bench = _Bench(record_bytes, num_records, repeats)
        pageable = bench.copy_gb_s()
        device_copy = bench.device_copy_gb_s()
        begin = time.perf_counter()
        registration = register(bench.host, chunk_bytes=bench.host.nbytes)
        registration_gb_s = bench.host.nbytes / (time.perf_counter() - begin) / 1e9
        if registration.kind != "registered":
            return LinkFacts(pageable=pageable, device_copy=device_copy, refusals=(registration.reason,))
        try:
            pinned = bench.copy_gb_s()
            zero_copy, refusals = bench.zero_copy_gb_s()
        finally:
            torch.cuda.synchronize()
            registration.release()
    return LinkFacts(pinned, pageable, zero_copy, device_copy, registration_gb_s, refusals)


class _Bench:
    """The buffers of one measurement, and a timed pass over them for each way."""

    def __init__(self, record_bytes: int, num_records: int, repeats: int) -> None:
        self._record_bytes, self._num_records, self._repeats = record_bytes, num_records, repeats
        num_bytes = record_bytes * num_records
        self.host = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
        self.host.view(torch.int32).copy_(torch.arange(num_bytes // 4, dtype=torch.int32))
        self._device = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")

    def copy_gb_s(self) -> float:
        """Copies of the host buffer as it is at the moment, pageable or registered."""
        pairs = list(zip(self._records(self._device), self._records(self.host), strict=True))

        def copy() -> None:
            for slab, record in pairs:
                slab.copy_(record, non_blocking=True)

        return self._gb_s(copy, self.host.numel())

    def device_copy_gb_s(self) -> float:
        mirror = torch.empty_like(self._device)

        def copy() -> None:
            for _ in range(_DEVICE_PASSES):
                mirror.copy_(self._device, non_blocking=True)

        return self._gb_s(copy, 2 * _DEVICE_PASSES * mirror.numel())

    def zero_copy_gb_s(self) -> tuple[float | None, tuple[str, ...]]:
        """GB/s of kernel reads, or None and the reason. Timed only when the bytes come out right."""
        try:
            from hetero_gpu.mapped import device_address
            from hetero_gpu.zero_copy import copy_from_host

            address = device_address(self.host.data_ptr())

            def copy() -> None:
                for index, slab in enumerate(self._records(self._device)):
                    copy_from_host(address + index * self._record_bytes, slab)

            self._device.zero_()
            copy()
            if not torch.equal(self._device.cpu(), self.host):
                return None, ("zero-copy reads gave wrong bytes",)
            return self._gb_s(copy, self.host.numel()), ()
        except (ImportError, OSError, RuntimeError) as error:
            # No Triton, no C compiler for its launcher, or memory that the device cannot map.
            return None, (f"zero-copy: {error}",)

    def _records(self, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return buffer.view(self._num_records, self._record_bytes).unbind()

    def _gb_s(self, work: Callable[[], None], num_bytes: int) -> float:
        work()
        times_ms: list[float] = []
        for _ in range(self._repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            work()
            end.record()
            end.synchronize()
            times_ms.append(start.elapsed_time(end))
        return num_bytes / statistics.median(times_ms) / 1e6
