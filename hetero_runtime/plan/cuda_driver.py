"""The first CUDA GPU, asked of the driver itself.

torch needs seconds to import; a plan should take milliseconds. The driver's C interface answers the same
questions. Free memory is read inside a context, so what a context itself takes is already left out.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

LIBRARY = "libcuda.so.1"
_NAME_BYTES = 256
_MAPS_HOST_MEMORY, _INTEGRATED, _MAJOR, _MINOR = 19, 18, 75, 76
"""CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, _INTEGRATED, _COMPUTE_CAPABILITY_MAJOR and _MINOR."""
_INTEGRATED_CAPABILITIES = ((8, 7), (11, 0))
"""Of Jetson Orin and Thor, which no GPU with memory of its own has."""
_BF16_MAJOR = 8
"""Compute capability from which bf16 is computed in hardware."""


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver sees it now."""

    name: str
    total_bytes: int
    free_bytes: int
    is_integrated: bool = False
    """Its memory is the host's own."""
    maps_host_memory: bool = True
    """Kernels can read host memory where it lies."""
    has_bf16: bool = True
    """Computes bf16 in hardware."""


def load_driver() -> Any | None:
    """The driver library, or None on a machine that has none."""
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError:
        return None


def first_gpu(driver: Any) -> Gpu | str:
    """The first visible GPU (CUDA_VISIBLE_DEVICES counts), or the reason why there is none."""
    count, device, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    total, free, size = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(_NAME_BYTES)
    steps = (
        ("cuInit", (0,)),
        ("cuDeviceGetCount", (ctypes.byref(count),)),
        ("cuDeviceGet", (ctypes.byref(device), 0)),
        ("cuDeviceGetName", (name, _NAME_BYTES, device)),
        ("cuDevicePrimaryCtxRetain", (ctypes.byref(context), device)),
    )
    if problem := _run(driver, steps):
        return problem
    try:
        reading = (
            ("cuCtxPushCurrent_v2", (context,)),
            ("cuMemGetInfo_v2", (ctypes.byref(free), ctypes.byref(total))),
            ("cuCtxPopCurrent_v2", (ctypes.byref(ctypes.c_void_p()),)),
            ("cuDeviceTotalMem_v2", (ctypes.byref(size), device)),
        )
        if problem := _run(driver, reading):
            return problem
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(device)
    attributes = _attributes(driver, device)
    if isinstance(attributes, str):
        return attributes
    return Gpu(
        name.value.decode(errors="replace"),
        total.value or size.value,
        free.value,
        is_integrated=bool(attributes[_INTEGRATED])
        or (attributes[_MAJOR], attributes[_MINOR]) in _INTEGRATED_CAPABILITIES,
        maps_host_memory=bool(attributes[_MAPS_HOST_MEMORY]),
        has_bf16=attributes[_MAJOR] >= _BF16_MAJOR,
    )


def _attributes(driver: Any, device: ctypes.c_int) -> dict[int, int] | str:
    """Attributes by number, or the reason why there are none."""
    values = {number: ctypes.c_int() for number in (_MAPS_HOST_MEMORY, _INTEGRATED, _MAJOR, _MINOR)}
    steps = tuple(
        ("cuDeviceGetAttribute", (ctypes.byref(value), number, device)) for number, value in values.items()
    )
    if problem := _run(driver, steps):
        return problem
    return {number: value.value for number, value in values.items()}


def _run(driver: Any, steps: tuple[tuple[str, tuple[Any, ...]], ...]) -> str | None:
    """Call one after another; the first that fails, as a sentence."""
    for function, arguments in steps:
        code = getattr(driver, function)(*arguments)
        if code != 0:
            return f"the CUDA driver refused {function} with error {code}"
    return None
