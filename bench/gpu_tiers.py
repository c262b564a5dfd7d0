"""Three tiers at once on a machine with a GPU, and unified memory played by its graphics card.

    tiers     Qwen3-30B-A3B's geometry, random weights, routing replayed. A quarter of the experts in slabs of
              the GPU; in host memory all of them (ram), or a half or a quarter, and the rest on the disk
    prefetch  the bundled model, its experts widened, its own text: seqmoe beside LRU, a half in host memory
    unified   the first model in mapped memory: computed where a board has it, here over the link

    python -m bench.gpu_tiers --routing routing.safetensors [--parts tiers unified] [--layers 4] [--tokens 8]

The recording is `bench.routing_replay`'s. Each engine has a process of its own, so that peaks of memory are
its own; its rows are written as soon as it is through, and one that fails leaves the others alone. Host
memory must hold all experts (1.2 GB a layer), the disk twice that.

Takes about 220 s with 8 layers where the disk gives and takes 1.6 GB/s: 25 to write and pack the first model,
80 for tiers, 55 for unified, 60 for prefetch; with `--layers 4 --tokens 8 --factor 56` about 120.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench.disk import best_read_gb_s, filesystem_of
from bench.gpu_tier_rows import (
    DEVICE_SHARE,
    HOST_SHARES,
    UNIFIED_SHARE,
    Packed,
    direct_rows,
    prefetch_rows,
    ram_rows,
    unified_rows,
)
from bench.harness import RESULTS, ResultFile, Row, T, attempt
from bench.models.random_checkpoint import add_geometry, ensure_checkpoint, geometry_of
from bench.models.random_geometry import RandomGeometry
from bench.routing import RecordedRouting, RoutingFacts
from bench.tier_case import TierCase
from bench.tiers import pack_beside
from bench.widened import write_widened
from hetero_runtime.plan import read_geometry
from hetero_runtime.tiers.supply import NUM_READERS

DEVICE = "cuda"

NAME = "gpu_tiers"
PARTS = ("tiers", "prefetch", "unified")
DISK_BYTES = 4 << 30
"""Read to see what the disk gives."""


@dataclass
class Findings:
    """What was measured so far, which is on the disk, and how many parts failed."""

    folder: Path
    rows: list[Row] = field(default_factory=list)
    num_failed: int = 0
    _began: float = field(default_factory=time.monotonic)

    def add(self, *rows: Row) -> None:
        """Write `rows` with those before."""
        self.rows.extend(rows)
        ResultFile.of(NAME, self.rows).save(self.folder)

    def attempt(self, what: str, function: Callable[[], T]) -> T | None:
        """As the harness's, with the seconds it took."""
        found = attempt(what, function)
        self.num_failed += found is None
        print(f"[{time.monotonic() - self._began:4.0f} s] {what}", flush=True)
        return found


# ---- models


def large_model(folder: Path, geometry: RandomGeometry, routing: Path) -> Packed:
    """Random weights, packed; the routing of held-out text is laid over them."""
    model = ensure_checkpoint(folder / "large", geometry)
    chosen = RecordedRouting.load(routing).laid_over(
        layers=geometry.layers, experts=geometry.experts, top_k=geometry.top_k
    )
    facts = RoutingFacts.of(chosen, geometry.experts)
    note = f"{geometry.layers} layers, random weights, routing replayed from recorded held-out text; {facts}"
    return _packed(model, routing, note)


def speaking_model(folder: Path, factor: int) -> Packed:
    """The bundled model with experts `factor` times as wide, packed: it says the same, by its own routers."""
    model = write_widened(folder / "speaking", factor)
    return _packed(model, None, f"the bundled model, its experts {factor} times as wide, sampled text")


def _packed(model: Path, routing: Path | None, note: str) -> Packed:
    file = pack_beside(model)
    rate = best_read_gb_s(file, threads=NUM_READERS, most_bytes=DISK_BYTES)
    print(
        f"{file.name}: {file.stat().st_size / 1e9:.2f} GB on {filesystem_of(file)}, {rate:.2f} GB/s",
        flush=True,
    )
    return Packed(model, read_geometry(model).num_routed_experts, rate, routing, note)


# ---- parts


def measure_tiers(findings: Findings, model: Packed, tokens: int) -> TierCase | None:
    """All experts in host memory, then fewer of them. Returns the first."""
    ram = findings.attempt(
        "tiers: ram",
        partial(model.run, {"backing": "ram", "residency": DEVICE_SHARE, "packed": False}, tokens=tokens),
    )
    if ram is not None:
        findings.add(*ram_rows(ram, model))
    for name, share in HOST_SHARES.items():
        memory = _direct(model, share)
        case = findings.attempt(
            f"tiers: direct, {name} % in host memory", partial(model.run, memory, tokens=tokens)
        )
        if case is not None:
            findings.add(*direct_rows(name, case, ram, model))
    return ram


def measure_prefetch(findings: Findings, model: Packed, tokens: int) -> None:
    """LRU and seqmoe over the same tiers."""
    memory = _direct(model, HOST_SHARES["50"])
    found = {
        preset: findings.attempt(
            f"prefetch: {preset}", partial(model.run, memory, tokens=tokens, preset=preset)
        )
        for preset in ("lru", "seqmoe")
    }
    lru, seqmoe = found["lru"], found["seqmoe"]
    if lru is not None and seqmoe is not None:
        findings.add(*prefetch_rows(lru, seqmoe, model))


def measure_unified(findings: Findings, model: Packed, discrete: TierCase | None, tokens: int) -> None:
    """All experts where they are computed, then a half of them. `discrete`: the case to stand beside."""
    for name, memory in (
        ("ram", {"backing": "ram"}),
        ("direct", {"backing": "direct", "residency": UNIFIED_SHARE}),
    ):
        run = partial(model.run, memory, tokens=tokens, device="unified")
        case = findings.attempt(f"unified: {name}", run)
        if case is not None:
            findings.add(*unified_rows(name, case, discrete, model))


def _direct(model: Packed, host_share: float) -> dict[str, Any]:
    host_slabs = int(host_share * model.num_experts)
    return {"backing": "direct", "residency": DEVICE_SHARE, "host_slabs": host_slabs}


# ---- the whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write `gpu_tiers.json` row by row. Returns how many engines or models failed."""
    options = parse(arguments)
    findings = Findings(options.results)
    with tempfile.TemporaryDirectory(prefix="hetero-gpu-tiers-", dir=options.folder) as temporary:
        folder = Path(temporary)
        if {"tiers", "unified"} & set(options.parts):
            _measure_large(findings, folder, options)
        if "prefetch" in options.parts:
            speaking = findings.attempt("the speaking model", partial(speaking_model, folder, options.factor))
            if speaking is not None:
                measure_prefetch(findings, speaking, options.tokens)
    if findings.rows:
        ResultFile.write(NAME, findings.rows, folder=options.results)
    print(f"{findings.num_failed} failed")
    return findings.num_failed


def _measure_large(findings: Findings, folder: Path, options: argparse.Namespace) -> None:
    make = partial(large_model, folder, geometry_of(options), options.routing)
    large, ram = findings.attempt("the large model", make), None
    if large is None:
        return
    if "tiers" in options.parts:
        ram = measure_tiers(findings, large, options.tokens)
    if "unified" in options.parts:
        measure_unified(findings, large, ram, options.tokens)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--routing", type=Path, required=True, help="what bench.routing_replay recorded")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tokens", type=int, default=16, help="of each of four answers")
    parser.add_argument(
        "--factor", type=int, default=112, help="how much wider the speaking model's experts are"
    )
    parser.add_argument(
        "--folder", type=Path, help="where to write, on the disk to be measured; default: the system's"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    add_geometry(parser)
    parser.set_defaults(layers=8)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
