"""Limits of containers are found in both versions of control groups; a GPU through a driver of our own."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from hetero_runtime.plan import Gpu, detect
from hetero_runtime.plan.cgroup import CgroupLimits, read_limits, usable_cpus
from hetero_runtime.plan.cuda_driver import first_gpu
from hetero_runtime.plan.hardware import has_cuda_build

MIB = 1 << 20
INTEGRATED, MAPS_HOST_MEMORY, MAJOR, MINOR = 18, 19, 75, 76


def _tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def test_version_2_takes_the_tightest_ancestor(tmp_path: Path) -> None:
    root = _tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user.slice/job",
            "sys/fs/cgroup/user.slice/memory.max": str(800 * MIB),
            "sys/fs/cgroup/user.slice/memory.current": str(500 * MIB),
            "sys/fs/cgroup/user.slice/memory.stat": f"anon 5\ninactive_file {100 * MIB}",
            "sys/fs/cgroup/user.slice/cpu.max": "250000 100000",
            "sys/fs/cgroup/user.slice/job/memory.max": "max",
            "sys/fs/cgroup/user.slice/job/cpu.max": "max 100000",
        },
    )
    assert read_limits(root) == CgroupLimits(800 * MIB, 400 * MIB, 2.5)


def test_version_1_knows_its_own_files_and_its_own_infinity(tmp_path: Path) -> None:
    root = _tree(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpuacct,cpu:/box\n4:memory:/box\n3:cpuset:/\n0::/",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": str(600 * MIB),
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": str(450 * MIB),
            "sys/fs/cgroup/memory/box/memory.stat": f"cache 1\ntotal_inactive_file {50 * MIB}",
            "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "150000",
            "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
        },
    )
    assert read_limits(root) == CgroupLimits(600 * MIB, 200 * MIB, 1.5)


def test_a_path_from_outside_the_container_falls_back_to_the_mount(tmp_path: Path) -> None:
    root = _tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/0123456789ab",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(300 * MIB),
            "sys/fs/cgroup/memory/memory.usage_in_bytes": str(400 * MIB),
        },
    )
    assert read_limits(root) == CgroupLimits(300 * MIB, 0, None)


def test_version_2_beside_version_1(tmp_path: Path) -> None:
    root = _tree(
        tmp_path,
        {"proc/self/cgroup": "0::/a", "sys/fs/cgroup/unified/a/memory.max": str(70 * MIB)},
    )
    assert read_limits(root).memory_bytes == 70 * MIB


def test_no_control_groups(tmp_path: Path) -> None:
    assert read_limits(tmp_path) == CgroupLimits(None, None, None)


@pytest.mark.parametrize(
    ("cpus", "affinity", "usable"), [(None, 8, 8), (2.5, 8, 2), (0.5, 8, 1), (16.0, 8, 8)]
)
def test_usable_cpus(cpus: float | None, affinity: int, usable: int) -> None:
    assert usable_cpus(CgroupLimits(None, None, cpus), affinity) == usable


def test_detect_counts_the_limit_in(tmp_path: Path) -> None:
    root = _tree(
        tmp_path,
        {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": str(64 * MIB)},
    )
    hardware = detect("cpu", root=root)
    assert (hardware.ram_total_bytes, hardware.ram_available_bytes) == (64 * MIB, 64 * MIB)
    assert hardware.gpu is None
    assert hardware.no_gpu_reason == "device is cpu"
    assert hardware.usable_cores >= 1


class _Driver:
    """Answers as the CUDA driver does; `refuses` is the function that fails. `attributes`: of the device, by
    the driver's number; others are 0."""

    def __init__(self, refuses: str = "", attributes: dict[int, int] | None = None) -> None:
        self.refuses, self.attributes = refuses, attributes or {MAPS_HOST_MEMORY: 1, MAJOR: 9}
        self.num_contexts = 0

    def __getattr__(self, function: str) -> Any:
        def call(*arguments: Any) -> int:
            if function == self.refuses:
                return 100
            self._answer(function, arguments)
            return 0

        return call

    def _answer(self, function: str, arguments: tuple[Any, ...]) -> None:
        if function == "cuDeviceGetName":
            arguments[0].value = b"NVIDIA H200"
        elif function == "cuMemGetInfo_v2":
            ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_size_t))[0] = 90 * MIB
            ctypes.cast(arguments[1], ctypes.POINTER(ctypes.c_size_t))[0] = 100 * MIB
        elif function == "cuDeviceGetAttribute":
            target = ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_int))
            target[0] = self.attributes.get(arguments[1], 0)
        elif function == "cuDevicePrimaryCtxRetain":
            self.num_contexts += 1
        elif function == "cuDevicePrimaryCtxRelease_v2":
            self.num_contexts -= 1


def test_gpu_facts_come_from_the_driver() -> None:
    driver = _Driver()
    assert first_gpu(driver) == Gpu("NVIDIA H200", total_bytes=100 * MIB, free_bytes=90 * MIB)
    assert driver.num_contexts == 0


@pytest.mark.parametrize(
    ("attributes", "is_integrated"),
    [
        ({INTEGRATED: 1, MAJOR: 12, MINOR: 1}, True),
        ({MAJOR: 8, MINOR: 7}, True),
        ({MAJOR: 11}, True),
        ({MAJOR: 8, MINOR: 6}, False),
    ],
    ids=["says so", "Orin", "Thor", "a graphics card"],
)
def test_boards_whose_memory_is_the_hosts(attributes: dict[int, int], is_integrated: bool) -> None:
    gpu = first_gpu(_Driver(attributes=attributes))
    assert isinstance(gpu, Gpu)
    assert (gpu.is_integrated, gpu.maps_host_memory) == (is_integrated, False)


@pytest.mark.parametrize("function", ["cuInit", "cuDeviceGet", "cuMemGetInfo_v2", "cuDeviceGetAttribute"])
def test_a_driver_that_refuses_is_a_reason(function: str) -> None:
    driver = _Driver(refuses=function)
    assert first_gpu(driver) == f"the CUDA driver refused {function} with error 100"
    assert driver.num_contexts == 0


@pytest.mark.parametrize(
    ("line", "has_cuda"),
    [
        ("cuda: Optional[str] = None", False),
        ("cuda: Optional[str] = '13.0'", True),
        ("cuda = '12.8'", True),
        ("hip = None", False),
    ],
)
def test_build_of_torch_is_read_without_importing_it(line: str, has_cuda: bool) -> None:
    assert has_cuda_build(f"__version__ = '2.13.0'\n{line}\ngit_version = 'x'\n") is has_cuda


@pytest.mark.gpu
def test_the_driver_and_torch_see_the_same_gpu() -> None:
    import torch

    gpu = detect("cuda").gpu
    assert gpu is not None
    assert gpu.name == torch.cuda.get_device_name(0)
    assert gpu.total_bytes == torch.cuda.mem_get_info(0)[1]
