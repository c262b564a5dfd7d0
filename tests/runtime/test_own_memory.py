"""A process's own memory, whatever its parent had."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hetero_runtime.own_memory import peak_rss_bytes, status_bytes

MANY = 300_000_000
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")


@ON_LINUX
def test_the_peak_stays_when_memory_is_given_back() -> None:
    before = status_bytes("VmRSS")
    touched = np.ones(MANY, dtype=np.uint8)
    held = status_bytes("VmRSS")
    del touched
    least = before + 0.9 * MANY  # the kernel adds its counts up a little late
    assert held > least
    assert peak_rss_bytes() > least > status_bytes("VmRSS")


@ON_LINUX
def test_a_larger_parent_is_no_part_of_the_peak() -> None:
    parent = np.ones(MANY, dtype=np.uint8)
    code = "from hetero_runtime.own_memory import peak_rss_bytes; print(peak_rss_bytes())"
    child = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert 1e6 < int(child.stdout) < len(parent)


@pytest.mark.parametrize("text", [None, "Name:\tpython\nVmRSS:\t 10 kB\n"], ids=["no file", "no such line"])
def test_without_the_kernels_count_the_peak_is_getrusages(tmp_path: Path, text: str | None) -> None:
    status = tmp_path / "status"
    if text is not None:
        status.write_text(text, encoding="utf-8")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert peak_rss_bytes(status) >= before
    with pytest.raises(OSError, match="does not report VmHWM"):
        status_bytes("VmHWM", status)


def test_kilobytes_of_the_asked_line_are_read(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("VmPeak:\t  900 kB\nVmHWM:\t     200 kB\nVmRSS:\t     100 kB\n", encoding="utf-8")
    assert peak_rss_bytes(status) == 200 * 1024
    assert status_bytes("VmRSS", status) == 100 * 1024
