"""`examine`: every check has its say, one that breaks is a line and hides no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero_runtime import doctor
from hetero_runtime.doctor import CHECKS, Finding, examine


def fine(folder: Path) -> list[Finding]:
    return [Finding("fine", str(folder), "", "ok", "all is well")]


def broken(folder: Path) -> list[Finding]:
    raise OSError("the driver is gone")


def test_a_broken_check_hides_no_other(tmp_path: Path) -> None:
    findings = examine(tmp_path, checks={"first": fine, "second": broken, "third": fine})
    assert [one.status for one in findings] == ["ok", "bad", "ok"]
    assert findings[1].name == "second"
    assert findings[1].meaning == "this check failed, the others stand: OSError: the driver is gone"


def test_a_check_whose_module_does_not_import_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_module(name: str) -> None:
        raise ImportError(f"{name} needs a library that is not here")

    monkeypatch.setattr(doctor.importlib, "import_module", no_module)
    (finding,) = examine(checks={"gpu": CHECKS["gpu"]})
    assert (finding.name, finding.status) == ("gpu", "bad")
    assert "ImportError: hetero_runtime.doctor.gpu needs" in finding.meaning


def test_an_interrupt_is_not_swallowed() -> None:
    def interrupted(folder: Path) -> list[Finding]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        examine(checks={"first": interrupted})


def test_the_folder_is_the_current_one_by_default_and_progress_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    heard: list[str] = []
    (finding,) = examine(checks={"only": fine}, on_start=heard.append)
    assert finding.value == str(tmp_path)
    assert heard == ["only"]


def test_this_machine_is_examined_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hetero_cpu_kernels import bandwidth

    monkeypatch.setattr(bandwidth, "default_buffer_bytes", lambda: 1 << 20)
    findings = examine(tmp_path)
    assert [one for one in findings if one.status == "bad"] == []
    names = " ".join(one.name for one in findings)
    for part in (
        "gpu",
        "link",
        "DRAM",
        "disk",
        "ISA",
        "cores",
        "NUMA",
        "memory",
        "memlock",
        "huge pages",
        "swap",
    ):
        assert part in names
    assert all(one.meaning for one in findings)
