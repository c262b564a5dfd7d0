"""Loading the experts of a checkpoint, against what its disk gives with direct reads.

Disk and loading are measured in turn, each time with the files dropped from the page cache, because a disk
that others share is not the same a minute later. `python -m bench.load_checkpoint [--checkpoint FOLDER]`
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.disk import direct_read_gb_s, drop_from_page_cache, filesystem_of
from bench.harness import RESULTS, ResultFile, Row
from bench.load_rss import LoadMemory, measure_load_memory
from bench.models.random_checkpoint import add_geometry, ensure_checkpoint, geometry_of
from hetero_runtime.checkpoint import Checkpoint
from hetero_runtime.experts.extent_reader import ReadPath
from hetero_runtime.experts.sources import ExpertsModule
from hetero_runtime.experts.store import load_store
from hetero_runtime.hf.conversion import split_checkpoint
from hetero_runtime.hf.loading import build_skeleton
from hetero_runtime.planned import plan_for
from hetero_runtime.source import config_from

DEVICE = "cuda"


class Load(NamedTuple):
    """One pair of measurements. `register_s` is None where CUDA cannot register the bank."""

    disk_gb_s: float
    load_gb_s: float
    register_s: float | None

    @property
    def over_disk(self) -> float:
        return self.load_gb_s / self.disk_gb_s


def experts_of(folder: Path) -> tuple[ExpertsModule, ...]:
    """What `load_store` takes, from headers and config alone."""
    import torch

    checkpoint = Checkpoint.open(folder)
    skeleton = build_skeleton(checkpoint, dtype="bfloat16", device=torch.device("cpu"))
    return split_checkpoint(skeleton.model, checkpoint, skeleton.quantizer).experts


def measure_load(folder: Path, experts: Sequence[ExpertsModule], *, threads: int) -> Load:
    """Read the files directly, then load them, both from a cold page cache."""
    files = sorted(folder.glob("*.safetensors"))
    drop_from_page_cache(files)
    disk_gb_s = direct_read_gb_s(files, threads=threads)
    drop_from_page_cache(files)
    num_bytes = 0

    def note_total(_: int, total: int) -> None:
        nonlocal num_bytes
        num_bytes = total

    began = time.perf_counter()
    store = load_store(experts, threads=threads, progress=note_total)
    load_s = time.perf_counter() - began
    began = time.perf_counter()
    store.register()
    register_s = time.perf_counter() - began if store.is_registered else None
    store.close()
    load = Load(disk_gb_s, num_bytes / load_s / 1e9, register_s)
    print(f"disk {load.disk_gb_s:.2f} GB/s, load {load.load_gb_s:.2f} GB/s in {load_s:.1f} s", flush=True)
    return load


def measure_path(folder: Path, experts: Sequence[ExpertsModule], path: ReadPath, *, threads: int) -> Row:
    """Load by one way of reading, from a cold page cache: what choosing between them is worth."""
    drop_from_page_cache(sorted(folder.glob("*.safetensors")))
    began = time.perf_counter()
    store = load_store(experts, threads=threads, read_path=path)
    seconds = time.perf_counter() - began
    num_bytes = store.bank_bytes
    store.close()
    return Row(id=f"main.load_{path.value}_gb_s", value=num_bytes / seconds / 1e9, unit="GB/s")


def rows_of(loads: Sequence[Load], memory: LoadMemory, *, note: str) -> list[Row]:
    """Medians as result rows."""
    disk_gb_s = statistics.median(load.disk_gb_s for load in loads)
    baseline = f"{memory.before / 1e9:.2f} GB of interpreter, libraries and skeleton before loading left out"
    roof = f"measured disk: {disk_gb_s:.2f} GB/s"
    rows = [
        Row(
            id="main.load_over_disk",
            value=statistics.median(load.over_disk for load in loads),
            unit="ratio",
            target=">=0.8",
            reference=roof,
            note=note,
        ),
        Row(
            id="main.load_gb_s",
            value=statistics.median(load.load_gb_s for load in loads),
            unit="GB/s",
            reference=roof,
        ),
        Row(
            id="main.rss_over_bank",
            value=memory.over_bank,
            unit="ratio",
            target="<=1.1",
            note=f"bank {memory.bank / 1e9:.2f} GB; {baseline}; the backbone is not loaded",
        ),
    ]
    seconds = [load.register_s for load in loads if load.register_s is not None]
    if seconds:
        note = f"cudaHostRegister of {memory.bank / 1e9:.1f} GB"
        rows.append(Row(id="main.register_s", value=statistics.median(seconds), unit="s", note=note))
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=Path(tempfile.gettempdir()) / "bench-checkpoint")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--each-path", action="store_true", help="also load by each way of reading alone")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    add_geometry(parser)
    options = parser.parse_args(arguments)
    folder = ensure_checkpoint(options.checkpoint, geometry_of(options))
    threads = plan_for(config_from(folder, {})).config.cpu.threads
    experts = experts_of(folder)
    loads = [measure_load(folder, experts, threads=threads) for _ in range(options.runs)]
    memory = measure_load_memory(folder, threads=threads)
    note = f"{threads} threads, {filesystem_of(folder)}, cold page cache, median of {options.runs} pairs"
    rows = rows_of(loads, memory, note=note)
    if options.each_path:
        rows += [measure_path(folder, experts, path, threads=threads) for path in ReadPath]
    ResultFile.write("load_checkpoint", rows, folder=options.results)


if __name__ == "__main__":
    main()
