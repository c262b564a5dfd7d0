"""Experts below host memory, on this machine's disk: direct reads beside the page cache and beside swap.

    1  the bundled model, its experts widened until they are several times the memory limit; packed
    2  without a limit: what it says, and seqmoe beside LRU at 25 % residency, both read directly
    3  under the limit: direct, mmap and swap say the same, each in a process of its own

`python -m bench.tiers` as root (control groups, swapon). Needs disk for about four times the experts; all is
written under --folder and deleted. The disk itself is measured in the same run, as `bench/disk.py` says.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.disk import best_read_gb_s, drop_from_page_cache
from bench.harness import RESULTS, ResultFile, Row
from bench.machine import ROOT
from bench.memory_limit import LimitedGroup, limited_group, swap_on
from bench.tier_case import TierCase
from bench.widened import write_widened
from hetero_runtime.beside_model import beside
from hetero_runtime.tiers.locate import EXPERTS_SUFFIX
from hetero_runtime.tiers.supply import NUM_READERS

DEVICE = "cpu"

MIB = 1 << 20
RESIDENCY = 0.25
FEWEST = 8
"""Slabs of mmap and swap."""
_SHARED: dict[str, Any] = {"device": "cpu", "execution": {"max_rows": 1, "max_length": 1024}}


class Limited(NamedTuple):
    """One backing under the limit."""

    case: TierCase
    peak_over_limit: float


class Made(NamedTuple):
    """The model and its expert file."""

    model: Path
    file: Path

    @property
    def expert_bytes(self) -> int:
        """Of the expert file."""
        return self.file.stat().st_size


def make(folder: Path, factor: int) -> Made:
    """Write the model and pack it."""
    model = write_widened(folder / "model", factor)
    return Made(model, pack_beside(model))


def pack_beside(model: Path) -> Path:
    """Pack `model` with the product's own command; the file lies beside it, on the disk."""
    file = beside(model, EXPERTS_SUFFIX)
    command = [sys.executable, "-m", "hetero_runtime", "pack", str(model), "--out", str(file)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    os.sync()
    return file


def unlimited(made: Made, tokens: int) -> dict[str, TierCase]:
    """All experts in memory; then LRU and seqmoe at 25 %, read directly."""
    settings: dict[str, dict[str, Any]] = {
        "ram": {"memory": {"backing": "ram", "residency": RESIDENCY}},
        "lru": {"memory": {"backing": "direct", "residency": RESIDENCY}, "preset": "lru"},
        "seqmoe": {"memory": {"backing": "direct", "residency": RESIDENCY}, "preset": "seqmoe"},
    }
    found = {}
    for name, each in settings.items():
        drop_from_page_cache([made.file, *made.model.glob("*.safetensors")])
        found[name] = _run(name, made, _SHARED | each, tokens)
    return found


def limited(made: Made, tokens: int, limit_bytes: int) -> dict[str, Limited]:
    """Every backing in a group of its own. Raises RuntimeError when one was killed."""
    found = {}
    for backing in ("direct", "mmap", "swap"):
        # as configs/edge-ssd.yaml; the others leave all memory but a few slabs to the kernel
        own: dict[str, Any] = {"memory": {"backing": backing}, "eviction": {"policy": "lfru"}}
        if backing != "direct":
            own["memory"] |= {"slabs": FEWEST}
        drop_from_page_cache([made.file, *made.model.glob("*.safetensors")])
        with limited_group(f"hetero-tiers-{os.getpid()}", limit_bytes) as group:
            case = _run(backing, made, _SHARED | own, tokens, group)
            if group.num_killed:
                raise RuntimeError(f"{backing}: the kernel killed {group.num_killed} processes for memory")
            found[backing] = Limited(case, group.peak_bytes / limit_bytes)
    return found


def _run(
    name: str, made: Made, config: dict[str, Any], tokens: int, group: LimitedGroup | None = None
) -> TierCase:
    case = TierCase.run(made.model, config, tokens=tokens, group=group)
    print(
        f"{name}: {case.tok_s:.3g} tok/s, {case.slabs} slabs, hits {100 * case.hit_rate:.1f} %, "
        f"{case.read_bytes / 1e9:.2f} GB moved in decode",
        flush=True,
    )
    return case


def rows_of(
    free: dict[str, TierCase], bound: dict[str, Limited], *, disk_gb_s: float, over_limit: float
) -> list[Row]:
    """All rows. Raises RuntimeError when two runs say different things."""
    said = {name: case.text for name, case in free.items()} | {n: each.case.text for n, each in bound.items()}
    different = [name for name, text in said.items() if text != said["ram"]]
    if different:
        raise RuntimeError(f"{', '.join(different)} said something else than all experts in memory")
    direct = bound["direct"].case
    speeds = ", ".join(f"{name} {each.case.tok_s:.3g}" for name, each in bound.items())
    note = f"experts {over_limit:.1f} times the limit; tok/s: {speeds}; the same tokens as without a limit"
    disk = f"measured disk: {disk_gb_s:.2f} GB/s, direct reads, {NUM_READERS} threads, the best of four"
    peaks = ", ".join(f"{name} {each.peak_over_limit:.3f}" for name, each in bound.items())
    lru, seqmoe = free["lru"], free["seqmoe"]
    return [
        Row(
            id="tier.direct_vs_swap",
            value=direct.tok_s / bound["swap"].case.tok_s,
            unit="ratio",
            target=">=3",
            reference=disk,
            note=note,
        ),
        Row(
            id="tier.direct_vs_mmap",
            value=direct.tok_s / bound["mmap"].case.tok_s,
            unit="ratio",
            target=">=1.5",
            reference=disk,
            note=note,
        ),
        Row(
            id="tier.disk_share",
            value=lru.prompt_read_gb_s / disk_gb_s,
            unit="ratio",
            target=">=0.8",
            reference=disk,
            note=f"{lru.prompt_read_gb_s:.2f} GB/s of records while a long prompt loads its experts",
        ),
        Row(
            id="tier.seqmoe_vs_lru",
            value=seqmoe.tok_s / lru.tok_s,
            unit="ratio",
            target=">=1",
            reference=f"LRU {lru.tok_s:.3g} tok/s, hits {100 * lru.hit_rate:.1f} %",
            note=f"{seqmoe.tok_s:.3g} tok/s, hits {100 * seqmoe.hit_rate:.1f} %, both at {RESIDENCY:.0%} "
            f"residency; {lru.read_bytes / 1e9:.2f} and {seqmoe.read_bytes / 1e9:.2f} GB read directly",
        ),
        Row(
            id="tier.peak_over_limit",
            value=max(each.peak_over_limit for each in bound.values()),
            unit="ratio",
            target="<=1",
            note=f"{peaks}, page cache included; nothing was killed",
        ),
        Row(
            id="tier.start_read_over_needed",
            value=lru.start.read / lru.start.needed,
            unit="ratio",
            target="<=1.1",
            reference=f"{lru.start.needed / 1e6:.0f} MB: the experts of a short prompt, other weights",
            note="read from the disk until the first token, nothing of the model in the page cache before",
        ),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write `tiers.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--factor", type=int, default=112, help="how much wider experts are: 6.9 MB each")
    parser.add_argument("--limit", type=int, default=768, help="MiB of the control group")
    parser.add_argument("--tokens", type=int, default=32, help="of each of four answers")
    parser.add_argument("--folder", type=Path, help="where to write; default: the system's")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="hetero-tiers-", dir=options.folder) as temporary:
        folder = Path(temporary)
        made = make(folder, options.factor)
        before = best_read_gb_s(made.file, threads=NUM_READERS)
        free = unlimited(made, options.tokens)
        disk_gb_s = max(before, best_read_gb_s(made.file, threads=NUM_READERS))
        with swap_on(folder / "swap", made.expert_bytes + 512 * MIB):
            bound = limited(made, options.tokens, options.limit * MIB)
        over_limit = made.expert_bytes / (options.limit * MIB)
        rows = rows_of(free, bound, disk_gb_s=disk_gb_s, over_limit=over_limit)
    ResultFile.write("tiers", rows, folder=options.results)


if __name__ == "__main__":
    main()
