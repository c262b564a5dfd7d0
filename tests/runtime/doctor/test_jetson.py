"""The Jetson section, from made-up files: no board was at hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero_runtime.doctor.base import Finding
from hetero_runtime.doctor.jetson import judge

MODES = """
< PM_CONFIG DEFAULT=2 >
< POWER_MODEL ID=0 NAME=MAXN >
CPU_ONLINE CORE_0 1
< POWER_MODEL ID=1 NAME=MODE_15W >
< POWER_MODEL ID=2 NAME=MODE_30W >
"""
ORIN = {
    "proc/device-tree/model": "NVIDIA Jetson AGX Orin Developer Kit\0",
    "etc/nv_tegra_release": "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64",
    "etc/nvpmodel.conf": MODES,
    "var/lib/nvpmodel/status": "pmode:0002 fmode:quiet",
    "sys/class/devfreq/15340000.vic/min_freq": "1",
    "sys/class/devfreq/15340000.vic/max_freq": "2",
    "sys/class/devfreq/17000000.gpu/min_freq": "306000000",
    "sys/class/devfreq/17000000.gpu/max_freq": "1300500000",
    "proc/swaps": "Filename Type Size Used Priority\n/dev/zram0 partition 2621440 0 5\n"
    "/dev/zram1 partition 2621440 0 5\n/dev/nvme0n1p2 partition 16777212 0 -2",
}


def board(root: Path, changes: dict[str, str] | None = None) -> dict[str, Finding]:
    """Findings of an Orin as it is delivered, but for `changes` of files."""
    for name, text in (ORIN | (changes or {})).items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return {one.name: one for one in judge(root)}


def test_another_machine_has_no_such_section(tmp_path: Path) -> None:
    assert judge(tmp_path) == []
    (tmp_path / "proc/device-tree").mkdir(parents=True)
    (tmp_path / "proc/device-tree/model").write_text("Raspberry Pi 5 Model B\0")
    assert judge(tmp_path) == []


def test_a_board_as_it_is_delivered(tmp_path: Path) -> None:
    target = tmp_path / "etc/systemd/system/default.target"
    target.parent.mkdir(parents=True)
    target.symlink_to("/lib/systemd/system/graphical.target")
    found = board(tmp_path)
    assert list(found) == ["Jetson", "Jetson Linux", "power mode", "GPU clock", "zram", "desktop"]
    assert found["Jetson"].value == "NVIDIA Jetson AGX Orin Developer Kit"
    assert found["Jetson Linux"].value == "R36.4.3"
    assert (found["power mode"].value, found["power mode"].status) == ("MODE_30W", "warn")
    assert "`sudo nvpmodel -m 0`" in found["power mode"].meaning
    assert (found["GPU clock"].value, found["GPU clock"].status) == (1300, "warn")
    assert (found["zram"].value, found["zram"].unit) == (5.0, "GiB")
    assert "set-default multi-user.target" in found["desktop"].meaning


def test_a_board_that_is_set_up(tmp_path: Path) -> None:
    found = board(
        tmp_path,
        {
            "var/lib/nvpmodel/status": "pmode:0000 fmode:cool",
            "sys/class/devfreq/17000000.gpu/min_freq": "1300500000",
            "proc/swaps": "Filename Type Size Used Priority",
        },
    )
    assert [one.status for one in found.values()] == ["ok"] * 4
    assert found["power mode"].value == "MAXN"
    assert found["GPU clock"].meaning == "held at its highest (jetson_clocks)"


@pytest.mark.parametrize("missing", ["etc/nv_tegra_release", "etc/nvpmodel.conf", "var/lib/nvpmodel/status"])
def test_what_a_container_does_not_see_is_left_out_or_said(tmp_path: Path, missing: str) -> None:
    board(tmp_path)
    (tmp_path / missing).unlink()
    found = {one.name: one for one in judge(tmp_path)}
    if missing == "etc/nv_tegra_release":
        assert found["Jetson Linux"].status == "warn"
    elif missing == "etc/nvpmodel.conf":
        assert found["power mode"].value == "mode 2"
    else:
        assert "power mode" not in found
