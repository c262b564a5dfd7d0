"""Everything that is measured on a GPU machine, as one command; a part that fails leaves the others alone.

    python3 -m bench.gpu_all --out DIR --corpus CORPUS [--work FOLDER] [--layers 16] [--freetoken-site SITE]

DIR gets the result files, FOLDER (50 GB for 16 layers, on the disk that is to be measured) the checkpoint;
FreeToken is measured where SITE has its wheels. On a copy of the tree without its history, set BENCH_COMMIT
to the commit that it is.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.harness import ResultFile


class Part(NamedTuple):
    """One process. `needs`: the parts without which it is not begun."""

    name: str
    words: tuple[str, ...]
    limit_s: float
    needs: tuple[str, ...] = ()


def parts_of(out: Path, corpus: Path, work: Path, layers: int, *, site: Path | None = None) -> list[Part]:
    """The parts in their order. `site`: where FreeToken is installed, if it is."""
    checkpoint, routing = str(work / "checkpoint"), str(work / "routing.safetensors")
    measured = ("--checkpoint", checkpoint, "--layers", str(layers), "--results", str(out))
    replayed = (*measured, "--routing", routing)
    both = ("checkpoint", "routing")
    peer = ("--checkpoint", checkpoint, "--routing", routing, "--results", str(out))
    tiers = ("bench.gpu_tiers", "--routing", routing, "--folder", str(work), "--results", str(out))
    record = ("bench.routing_replay", "--corpus", str(corpus), "--out", routing)
    parts = [
        Part("routing", record, 60),
        Part("checkpoint", ("bench.models.random_checkpoint", checkpoint, "--layers", str(layers)), 150),
        Part("load", ("bench.load_checkpoint", *measured), 200, ("checkpoint",)),
        Part("decode", ("bench.eager_decode", *replayed, "--seconds", "70"), 240, both),
        Part("graph", ("bench.graph_decode", *replayed), 180, both),
        Part("breakdown", ("bench.step_breakdown", *replayed), 120, both),
        Part("context", ("bench.context_decode", *measured), 90, ("checkpoint",)),
        Part("tiers", tiers, 400, ("routing",)),
    ]
    if site is not None:
        words = ("bench.against_freetoken", *peer, "--freetoken-site", str(site))
        parts.append(Part("freetoken", words, 300, both))
    return parts


def run(parts: Sequence[Part]) -> list[str]:
    """Run the parts one after another. Returns what failed, with the reason."""
    failed: dict[str, str] = {}
    for part in parts:
        if missing := [name for name in part.needs if name in failed]:
            failed[part.name] = f"needs {', '.join(missing)}"
            continue
        print(f"=== {part.name}: python -m {shlex.join(part.words)}", flush=True)
        began = time.monotonic()
        try:
            code = subprocess.run([sys.executable, "-m", *part.words], timeout=part.limit_s).returncode
        except subprocess.TimeoutExpired:
            failed[part.name] = f"took longer than {part.limit_s:.0f} s"
            continue
        if code:
            failed[part.name] = f"exit status {code}"
        print(f"=== {part.name}: {time.monotonic() - began:.0f} s", flush=True)
    return [f"{name}: {reason}" for name, reason in failed.items()]


def print_results(out: Path) -> None:
    """One line a row, so that the end of a long log says everything."""
    for path in sorted(out.glob("*.json")):
        result = ResultFile.read(path)
        print(f"--- {result.bench} ({result.commit[:12]}, {result.machine['gpu']})")
        for row in result.rows:
            mark = {True: "met", False: "NOT MET", None: ""}[row.is_met]
            value = f"{row.value:10.4g} {row.unit:6}"
            print(f"{row.id:34} {value} {row.target or '':7} {mark:8}{row.reference or ''}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything, print everything. Returns how many parts failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "bench-work")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--freetoken-site", type=Path, help="where FreeToken's wheels were installed")
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    parts = parts_of(options.out, options.corpus, options.work, options.layers, site=options.freetoken_site)
    failed = run(parts)
    print_results(options.out)
    print("\n".join(["failed:", *failed]) if failed else "all parts done")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
