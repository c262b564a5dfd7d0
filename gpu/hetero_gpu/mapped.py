"""Host memory that kernels read where it lies: on an integrated GPU the one memory of both.

    host      uint8 [n]   readers of a checkpoint or a disk write here
    device    uint8 [n]   the same bytes as the device addresses them

The driver allocates it, page-locked and mapped; nothing is registered afterwards, which some boards refuse.
It is not managed memory: where host and device cannot use that at once (Jetson), the host may not touch it
while any kernel runs, and experts are read from a disk meanwhile. Kernels see what the host wrote before
their launch. On a GPU with memory of its own every read crosses the link, each time.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any, Protocol

import torch

_PORTABLE, _MAPPED = 1, 2
"""CU_MEMHOSTALLOC_PORTABLE: for every context. CU_MEMHOSTALLOC_DEVICEMAP: kernels can address it."""


def device_address(host_address: int) -> int:
    """The address under which the current device reads registered host memory.

    The two are equal where the driver maps registered memory one to one, which not every system does.
    Raises OSError without a CUDA driver and RuntimeError when the memory is not registered and mapped.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    pointer = ctypes.c_uint64()
    code = driver.cuMemHostGetDevicePointer_v2(
        ctypes.byref(pointer), ctypes.c_void_p(host_address), ctypes.c_uint(0)
    )
    if code != 0:
        raise RuntimeError(
            f"host memory at {host_address:#x} is not mapped for the device (driver error {code})"
        )
    return pointer.value


class Mapper(Protocol):
    """What gives out such memory."""

    def allocate(self, num_bytes: int) -> int:
        """Room that begins at a page; its host address. Raises MemoryError when it is refused."""

    def alias(self, address: int, num_bytes: int) -> torch.Tensor:
        """The same bytes as a tensor of the device, uint8 `[num_bytes]`, not a copy."""

    def free(self, address: int) -> None:
        """Wait for the device, then give the pages back."""


class MappedMemory:
    """`num_bytes` of it. `mapper`: CUDA's, unless a test brings its own."""

    def __init__(self, num_bytes: int, mapper: Mapper | None = None) -> None:
        """Raises MemoryError when there is no room, OSError or RuntimeError when CUDA cannot be used."""
        assert num_bytes > 0, f"mapped memory of {num_bytes} bytes"
        self._mapper = CudaMapper() if mapper is None else mapper
        self._address: int | None = self._mapper.allocate(num_bytes)
        try:
            self.device = self._mapper.alias(self._address, num_bytes)
        except BaseException:
            self.close()
            raise
        whole = (ctypes.c_uint8 * num_bytes).from_address(self._address)
        self.host = torch.frombuffer(whole, dtype=torch.uint8)

    def close(self) -> None:
        """Give it back; safe to call twice. Its addresses go too: no view is used again."""
        if self._address is not None:
            self._mapper.free(self._address)
            self._address = None


class CudaMapper:
    """The CUDA driver, in the context that torch uses."""

    def __init__(self) -> None:
        torch.zeros(1, device="cuda")  # makes that context, and makes it this thread's
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._starts = dict[int, int]()
        """What the driver gave, by the first page in it."""

    def allocate(self, num_bytes: int) -> int:
        """See Mapper."""
        pointer = ctypes.c_void_p()
        size = num_bytes + mmap.PAGESIZE - 1  # small pieces begin anywhere
        code = self._driver.cuMemHostAlloc(
            ctypes.byref(pointer), ctypes.c_size_t(size), ctypes.c_uint(_PORTABLE | _MAPPED)
        )
        if code != 0 or pointer.value is None:
            raise MemoryError(
                f"the CUDA driver maps no {num_bytes / 1e9:.2f} GB of host memory, error {code}"
            )
        first_page = -(-pointer.value // mmap.PAGESIZE) * mmap.PAGESIZE
        self._starts[first_page] = pointer.value
        return first_page

    def alias(self, address: int, num_bytes: int) -> torch.Tensor:
        """See Mapper."""
        source = _DeviceBytes(device_address(address), num_bytes)
        tensor = torch.as_tensor(source, device="cuda")
        assert tensor.data_ptr() == source.address, "torch copied what it should have wrapped"
        return tensor

    def free(self, address: int) -> None:
        """See Mapper."""
        torch.cuda.synchronize()
        code = self._driver.cuMemFreeHost(ctypes.c_void_p(self._starts.pop(address)))
        assert code == 0, f"the CUDA driver does not free {address:#x}, error {code}"


class _DeviceBytes:
    """Bytes at a device address, told in the way that torch wraps without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.address = address
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
