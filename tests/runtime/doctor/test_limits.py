"""Memory, memlock, huge pages, swap and WSL from made-up files and numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero_runtime.doctor.base import GIB
from hetero_runtime.doctor.limits import (
    judge_huge_pages,
    judge_memlock,
    judge_memory,
    judge_swap,
    judge_wsl,
)


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")


def test_memory_counts_experts() -> None:
    (free,) = judge_memory(60 * GIB, total=64 * GIB, limit=None)
    assert (free.value, free.unit, free.status) == (60.0, "GiB", "ok")
    assert "6826 experts fits, each of 9.4 MB" in free.meaning


@pytest.mark.parametrize(("limit", "lines"), [(8 * GIB, 2), (64 * GIB, 1)], ids=["container", "no limit"])
def test_a_container_has_a_line_of_its_own(limit: int, lines: int) -> None:
    findings = judge_memory(4 * GIB, total=64 * GIB, limit=limit)
    assert len(findings) == lines
    assert all("may use 8.0 of 64.0 GiB" in one.meaning for one in findings[1:])


def test_memlock() -> None:
    assert judge_memlock(None).value == "unlimited"
    limited = judge_memlock(8 << 20)
    assert (limited.value, limited.unit) == (8.0, "MiB")
    assert "staging ring" in limited.meaning


@pytest.mark.parametrize(
    ("text", "mode", "status"),
    [
        ("always [madvise] never", "madvise", "ok"),
        ("[always] madvise never", "always", "ok"),
        ("always madvise [never]", "never", "warn"),
        (None, "absent", "warn"),
    ],
)
def test_huge_pages(tmp_path: Path, text: str | None, mode: str, status: str) -> None:
    if text is not None:
        write(tmp_path / "sys/kernel/mm/transparent_hugepage/enabled", text)
    (finding,) = judge_huge_pages(tmp_path)
    assert (finding.value, finding.status) == (mode, status)


def test_pages_set_aside_are_told(tmp_path: Path) -> None:
    write(tmp_path / "proc/meminfo", "MemTotal: 100 kB\nHugetlb:         2097152 kB")
    _, reserved = judge_huge_pages(tmp_path)
    assert (reserved.value, reserved.status) == (2.0, "warn")


@pytest.mark.parametrize(("total", "used", "status"), [(0, 0, "ok"), (GIB, 0, "ok"), (4 * GIB, GIB, "warn")])
def test_swap(total: int, used: int, status: str) -> None:
    assert judge_swap(total, used).status == status


def test_wsl(tmp_path: Path) -> None:
    assert judge_wsl(tmp_path) == []
    write(tmp_path / "proc/sys/kernel/osrelease", "5.15.90.1-microsoft-standard-WSL2")
    (finding,) = judge_wsl(tmp_path)
    assert "about half of the memory" in finding.meaning
