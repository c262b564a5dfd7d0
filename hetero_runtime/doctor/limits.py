"""What the kernel lets this process take: memory, locked memory, huge pages, swap."""

from __future__ import annotations

import re
import resource
from pathlib import Path

import psutil

from hetero_runtime.doctor.base import BANK_GB, EXPERT_BYTES, GIB, Finding, num_experts
from hetero_runtime.plan.cgroup import read_limits
from hetero_runtime.plan.hardware import detect

_SMALL_PAGE_BYTES = 4096


def check(folder: Path) -> list[Finding]:
    """Memory and its limits on this machine."""
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_endless = locked == resource.RLIM_INFINITY
    swap = psutil.swap_memory()
    return [
        *_memory(),
        judge_memlock(None if is_endless else locked),
        *judge_huge_pages(Path("/")),
        judge_swap(swap.total, swap.used),
        *judge_wsl(Path("/")),
    ]


def _memory() -> list[Finding]:
    free = detect("cpu").ram_available_bytes  # what a plan would find
    return judge_memory(free, total=psutil.virtual_memory().total, limit=read_limits().memory_bytes)


def judge_memory(free: int, *, total: int, limit: int | None) -> list[Finding]:
    """Bytes that can be taken now, the machine's total, and the container's limit (None: none)."""
    meaning = f"a host bank of {num_experts(free)} experts fits, each of {EXPERT_BYTES / 1e6:.1f} MB"
    findings = [Finding("host memory, free", round(free / GIB, 1), "GiB", "ok", meaning)]
    if limit is not None and limit < total:
        meaning = (
            f"the container may use {limit / GIB:.1f} of {total / GIB:.1f} GiB: `memory.host: auto` and "
            "`plan` stay within it"
        )
        findings.append(Finding("container memory", round(limit / GIB, 1), "GiB", "warn", meaning))
    return findings


def judge_memlock(limit: int | None) -> Finding:
    """What the locked-memory limit (bytes, None for none) means."""
    if limit is None:
        return Finding("memlock", "unlimited", "", "ok", "the bank may be locked whole")
    meaning = (
        "this much may be locked with mlock; CUDA registers through its own driver and seldom counts against "
        "it; where it does, the report has a 'link refusal' and copies take a pinned staging ring "
        "(`ulimit -l unlimited` lifts the limit)"
    )
    return Finding("memlock", round(limit / 2**20, 1), "MiB", "ok", meaning)


def judge_huge_pages(root: Path) -> list[Finding]:
    """Whether the bank gets huge pages, from `root`/sys and `root`/proc."""
    file = root / "sys/kernel/mm/transparent_hugepage/enabled"
    mode = _chosen(file.read_text()) if file.exists() else "absent"
    pages = int(BANK_GB * 1e9 / _SMALL_PAGE_BYTES / 1e6)
    if mode in ("madvise", "always"):
        meaning = "the bank asks for huge pages and gets them where memory is not fragmented"
        found = Finding("huge pages", mode, "", "ok", meaning)
    else:
        meaning = (
            f"a bank of {BANK_GB} GB is {pages} million small pages: slower to fill, register and read; "
            "`echo madvise > /sys/kernel/mm/transparent_hugepage/enabled` as root changes it"
        )
        found = Finding("huge pages", mode, "", "warn", meaning)
    return [found, *_reserved(root)]


def _reserved(root: Path) -> list[Finding]:
    """Pages set aside for hugetlbfs, which this runtime does not use."""
    file = root / "proc/meminfo"
    text = file.read_text() if file.exists() else ""
    kib = re.search(r"^Hugetlb:\s+(\d+) kB", text, re.MULTILINE)
    if kib is None or int(kib[1]) == 0:
        return []
    meaning = "set aside as hugetlb pages, which the bank does not use: `vm.nr_hugepages=0` gives them back"
    return [Finding("reserved pages", round(int(kib[1]) / 2**20, 1), "GiB", "warn", meaning)]


def judge_swap(total: int, used: int) -> Finding:
    """What swap of `total` bytes, `used` of them taken, means."""
    if total == 0:
        return Finding("swap", 0, "GiB", "ok", "no swap: an expert in the bank never comes back from disk")
    if used == 0:
        meaning = "not in use; a bank that is registered with CUDA cannot be swapped out"
        return Finding("swap", round(total / GIB, 1), "GiB", "ok", meaning)
    meaning = f"{used / GIB:.1f} GiB are swapped out: memory is short, and experts not registered may follow"
    return Finding("swap", round(total / GIB, 1), "GiB", "warn", meaning)


def judge_wsl(root: Path) -> list[Finding]:
    """Windows' Linux caps pinned memory; nothing to say elsewhere."""
    file = root / "proc/sys/kernel/osrelease"
    if not file.exists() or "microsoft" not in file.read_text().lower():
        return []
    meaning = "Windows lets CUDA register about half of the memory; what is over goes through a staging ring"
    return [Finding("WSL", True, "", "warn", meaning)]


def _chosen(text: str) -> str:
    """The bracketed word of a kernel choice such as `always [madvise] never`."""
    found = re.search(r"\[(\w+)\]", text)
    return found[1] if found else text.strip()
