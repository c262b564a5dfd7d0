"""What this machine has for a plan: memory, a GPU, cores. Limits of containers are counted in."""

from __future__ import annotations

import importlib.util
import mmap
import os
import re
from dataclasses import dataclass
from pathlib import Path

import psutil

from hetero_runtime.plan.cgroup import read_limits, usable_cpus
from hetero_runtime.plan.cuda_driver import LIBRARY, Gpu, first_gpu, load_driver


@dataclass(frozen=True)
class Hardware:
    """Facts of one machine at one moment; a test writes its own."""

    ram_total_bytes: int
    """Host memory, or the tightest cgroup limit where that is less."""
    ram_available_bytes: int
    """Host memory that can be taken now without swapping, cgroup limits included."""
    physical_cores: int
    usable_cores: int
    """Logical cores that affinity and the cgroup's CPU quota leave to this process."""
    page_bytes: int = mmap.PAGESIZE
    gpu: Gpu | None = None
    no_gpu_reason: str = ""
    """Why `gpu` is None."""
    swap_free_bytes: int = 0
    """Swap that is not taken yet."""
    has_triton: bool = True
    """Whether kernels can be compiled for the GPU."""


def detect(device: str = "auto", *, root: Path = Path("/")) -> Hardware:
    """Look at this machine. `device` cpu: no GPU is looked for. `root` holds proc and sys (for tests)."""
    limits = read_limits(root)
    memory = psutil.virtual_memory()
    logical = os.cpu_count() or 1
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    gpu = "device is cpu" if device == "cpu" else detect_gpu()
    return Hardware(
        ram_total_bytes=_least(memory.total, limits.memory_bytes),
        ram_available_bytes=_least(memory.available, limits.memory_free_bytes),
        physical_cores=psutil.cpu_count(logical=False) or logical,
        usable_cores=usable_cpus(limits, affinity),
        gpu=gpu if isinstance(gpu, Gpu) else None,
        no_gpu_reason=gpu if isinstance(gpu, str) else "",
        swap_free_bytes=psutil.swap_memory().free,
        has_triton=importlib.util.find_spec("triton") is not None,
    )


def detect_gpu() -> Gpu | str:
    """The first GPU that torch can use, or the reason why there is none. Does not import torch."""
    driver = load_driver()
    if driver is None:
        return f"no CUDA driver is installed ({LIBRARY} is not found)"
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "torch is not installed"
    version = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    if not has_cuda_build(version):
        return "the installed torch is built without CUDA"
    return first_gpu(driver)


def has_cuda_build(version_source: str) -> bool:
    """Whether torch/version.py, given as text, belongs to a build with CUDA."""
    found = re.search(r"^cuda\b[^=\n]*=\s*(\S+)", version_source, re.MULTILINE)
    return found is not None and found[1] != "None"


def _least(machine: int, limit: int | None) -> int:
    return machine if limit is None else min(machine, limit)
