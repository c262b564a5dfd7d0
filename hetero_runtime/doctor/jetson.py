"""NVIDIA Jetson: which board, which release, and what holds it back. Nothing to say elsewhere.

Sources: the Jetson Linux developer guide, on nvpmodel, jetson_clocks and zram. No board was at hand: what is
read here was tried on made-up files.
"""

from __future__ import annotations

import re
from pathlib import Path

from hetero_runtime.doctor.base import Finding

_GPU_DEVICES = re.compile(r"gpu|ga10b|gv11b")
_FULL_POWER = "MAXN"
"""Power modes of this name, or one that begins so, cap nothing."""


def check(folder: Path) -> list[Finding]:
    """Read this machine's files."""
    return judge(Path("/"))


def judge(root: Path) -> list[Finding]:
    """Findings for the machine whose files lie below `root`; none for one that is no Jetson."""
    board = (_text(root / "proc/device-tree/model") or "").rstrip("\0")
    release = _release(_text(root / "etc/nv_tegra_release"))
    if release is None and "jetson" not in board.lower():
        return []
    return [
        Finding("Jetson", board or "unknown board", "", "ok", _WHAT_IT_IS),
        _system(release),
        *_power(root),
        *_clocks(root),
        *_zram(root),
        *_desktop(root),
    ]


_WHAT_IT_IS = (
    "GPU and CPU share one memory: device: auto is unified, experts are computed where they were loaded; "
    "configs/jetson_orin_32gb.yaml and jetson_orin_64gb.yaml are a start"
)


def _system(release: str | None) -> Finding:
    if release is None:
        meaning = "/etc/nv_tegra_release is not there: not a system of NVIDIA's, or a container without it"
        return Finding("Jetson Linux", None, "", "warn", meaning)
    return Finding("Jetson Linux", release, "", "ok", "torch must be a build for this release's CUDA")


def _power(root: Path) -> list[Finding]:
    """The power mode by name, as nvpmodel keeps it."""
    status, table = _text(root / "var/lib/nvpmodel/status"), _text(root / "etc/nvpmodel.conf")
    mode = re.search(r"pmode:0*(\d+)", status or "")
    names = dict(re.findall(r"<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=(\S+?)\s*>", table or ""))
    if mode is None:
        return []
    name = names.get(mode[1], f"mode {mode[1]}")
    if name.startswith(_FULL_POWER):
        return [Finding("power mode", name, "", "ok", "clocks and cores are not capped")]
    full = next((number for number, name in names.items() if name.startswith(_FULL_POWER)), "0")
    meaning = f"caps clocks, and may switch cores off: `sudo nvpmodel -m {full}` lifts that, for more power"
    return [Finding("power mode", name, "", "warn", meaning)]


def _clocks(root: Path) -> list[Finding]:
    """Whether jetson_clocks holds the GPU at its highest clock."""
    for device in sorted((root / "sys/class/devfreq").glob("*")):
        least, most = _number(device / "min_freq"), _number(device / "max_freq")
        if _GPU_DEVICES.search(device.name) is None or least is None or most is None:
            continue
        mhz = round(most / 1e6)
        if least == most:
            return [Finding("GPU clock", mhz, "MHz", "ok", "held at its highest (jetson_clocks)")]
        meaning = (
            "falls while the GPU waits, as between the kernels of a token; `sudo jetson_clocks` holds it"
        )
        return [Finding("GPU clock", mhz, "MHz", "warn", meaning)]
    return []


def _zram(root: Path) -> list[Finding]:
    """Swap that lies in the memory which it is to relieve."""
    lines = (_text(root / "proc/swaps") or "").splitlines()
    sizes = [int(line.split()[2]) for line in lines if line.startswith("/dev/zram")]
    if not sizes:
        return []
    meaning = (
        "swaps to the same memory, compressed by cores that experts need, and weights do not compress: "
        "`sudo systemctl disable nvzramconfig`, then restart; use swap on an SSD if any"
    )
    return [Finding("zram", round(sum(sizes) / 2**20, 1), "GiB", "warn", meaning)]


def _desktop(root: Path) -> list[Finding]:
    """Whether the system starts a desktop."""
    target = root / "etc/systemd/system/default.target"
    if not target.is_symlink() or "graphical" not in target.readlink().name:
        return []
    meaning = (
        "the display takes memory that experts could have; `sudo systemctl set-default multi-user.target` "
        "starts without it"
    )
    return [Finding("desktop", True, "", "warn", meaning)]


def _release(text: str | None) -> str | None:
    """`R36.4.3` of `# R36 (release), REVISION: 4.3, ...`"""
    found = re.match(r"# (R\d+) \(release\), REVISION: ([\d.]+)", text or "")
    return None if found is None else f"{found[1]}.{found[2]}"


def _number(file: Path) -> int | None:
    text = _text(file)
    return None if text is None else int(text)


def _text(file: Path) -> str | None:
    """None where there is no such file, or not for us."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
