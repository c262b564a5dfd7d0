"""Devices that torch can use, their memory, and Triton."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
from pathlib import Path

import torch

from hetero_runtime.doctor.base import EXPERT_BYTES, GIB, Finding, Status, num_experts
from hetero_runtime.plan.cuda_driver import LIBRARY

_NATIVE_BF16 = 8  # compute capability from which bf16 is computed in hardware
_DRIVER = Path("/proc/driver/nvidia/version")
_PCI = Path("/sys/bus/pci/devices")
_PCI_ADDRESS_BYTES = 16  # "0000:1b:00.0" and its end


def check(folder: Path) -> list[Finding]:
    """One block of findings a device, then Triton."""
    if not torch.cuda.is_available():
        return [_no_device(_DRIVER)]
    devices = [finding for index in range(torch.cuda.device_count()) for finding in _device(index)]
    return [*devices, _triton()]


def _no_device(driver: Path) -> Finding:
    if driver.exists():
        built = torch.version.cuda
        reason = f"is built for CUDA {built} and cannot use it" if built else "is built without CUDA"
        meaning = (
            f"an NVIDIA driver is here, but torch {torch.__version__} {reason}: install a torch that fits"
        )
        return Finding("gpu", None, "", "warn", f"{meaning}; until then everything runs on the CPU")
    meaning = "no CUDA device: `device: auto` runs everything on the CPU, with the same answers"
    return Finding("gpu", None, "", "absent", meaning)


def _device(index: int) -> list[Finding]:
    facts = torch.cuda.get_device_properties(index)
    name = f"gpu {index}"
    capability = f"compute capability {facts.major}.{facts.minor}"
    if facts.major < _NATIVE_BF16:
        model = Finding(
            name, facts.name, "", "warn", f"{capability}: no bf16 in hardware, prefer fp16 weights"
        )
    else:
        model = Finding(name, facts.name, "", "ok", f"{capability}: computes bf16 in hardware")
    return [model, _memory(name, index, is_unified=bool(facts.is_integrated)), *_node(name, index)]


def _memory(name: str, index: int, *, is_unified: bool) -> Finding:
    free, total = torch.cuda.mem_get_info(index)
    meaning = (
        f"room for {num_experts(free)} slabs of {EXPERT_BYTES / 1e6:.1f} MB, before backbone and KV cache"
    )
    if is_unified:
        meaning += "; this memory is the host's own: device: auto is unified, and plans go by host memory"
    is_taken = free < total / 2
    if is_taken:
        meaning += f"; other processes hold {(total - free) / GIB:.1f} GiB of {total / GIB:.1f}"
    status: Status = "warn" if is_taken else "ok"
    return Finding(f"{name} free memory", round(free / GIB, 1), "GiB", status, meaning)


def _node(name: str, index: int) -> list[Finding]:
    """The NUMA node that the device hangs on, where the kernel says so."""
    address = ctypes.create_string_buffer(_PCI_ADDRESS_BYTES)
    if ctypes.CDLL(LIBRARY).cuDeviceGetPCIBusId(address, _PCI_ADDRESS_BYTES, index) != 0:
        return []
    file = _PCI / address.value.decode().lower() / "numa_node"
    node = int(file.read_text()) if file.exists() else -1
    if node < 0:
        return []
    meaning = (
        f"host memory on node {node} is nearest; on a machine with more nodes start under "
        f"`numactl --cpunodebind={node} --preferred={node}`"
    )
    return [Finding(f"{name} NUMA node", node, "", "ok", meaning)]


def _triton() -> Finding:
    if importlib.util.find_spec("triton") is None:
        meaning = (
            "no Triton: experts come by copies only, and execution.mode: auto is eager; `pip install "
            "'hetero-runtime[gpu]'` adds it"
        )
        return Finding("triton", None, "", "absent", meaning)
    version = importlib.metadata.version("triton")
    meaning = (
        "kernels that read experts straight from host memory can be built: execution.mode: auto decodes in a "
        "captured step where model and configuration allow it (`hetero-runtime plan` says whether)"
    )
    return Finding("triton", version, "", "ok", meaning)
