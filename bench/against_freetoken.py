"""Ours against FreeToken in one run: same checkpoint, slots, prompts, recorded routing, policy (LRU).

    python -m bench.against_freetoken --checkpoint FOLDER --routing FILE --freetoken-site DIR

DIR is where the wheels of `freetoken` 0.1.3 were installed (`pip install --target DIR`). Each engine runs at
each residency in a process of its own, one after another; one that fails leaves out only its own rows. With
all experts resident the routers of the checkpoint choose; else both engines replay the recording. Our first
process begins with an empty Triton cache, so that its start has every kernel to compile.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.figures import ChildError, Figures, measure_in_child
from bench.harness import RESULTS, ResultFile, Row
from bench.routing import RecordedRouting, RoutingFacts

DEVICE = "cuda"
RESIDENCIES = (1.0, 0.45, 0.25)
TTFT_RESIDENCY = 0.45
OURS, PEER = "bench.decode_case", "bench.freetoken_peer"


class Pair(NamedTuple):
    """Both engines at one residency; None for one that failed."""

    ours: Figures | None
    peer: Figures | None


class Facts(NamedTuple):
    """What was run, for the notes."""

    model: str
    routing: str

    def note(self, residency: float) -> str:
        """With all experts resident no routing is replayed."""
        return f"{self.model}; {'their own routing' if residency == 1 else self.routing}"


def rows_of(pairs: Mapping[float, Pair], facts: Facts) -> list[Row]:
    """Ratios with their targets, then the numbers that they come from."""
    rows: list[Row] = []
    for residency, (ours, peer) in pairs.items():
        note = facts.note(residency)
        if ours and peer:
            rows += _ratios(ours, peer, note)
        rows += [row for figures in (ours, peer) if figures for row in _numbers(figures, note)]
    return rows + _start_rows([pair.ours for pair in pairs.values()])


def _ratios(ours: Figures, peer: Figures, note: str) -> list[Row]:
    name = "resident" if ours.residency == 1 else f"offload{_percent(ours)}"
    slots = "" if ours.residency == 1 else f"; slots {ours.slots} and {peer.slots}"
    rows = [
        Row(
            id=f"graph.{name}_vs_freetoken",
            value=ours.tok_s / peer.tok_s,
            unit="ratio",
            target=">=1.3",
            reference=f"{peer.engine}: {peer.tok_s:.4g} tok/s, same run",
            note=f"ours {ours.tok_s:.4g} tok/s{_hits(ours, peer)}{slots}; {note}",
        )
    ]
    for length in sorted(set(ours.ttfts_ms) & set(peer.ttfts_ms)):
        ours_ms, peer_ms = ours.ttfts_ms[length], peer.ttfts_ms[length]
        rows.append(
            Row(
                id=f"graph.ttft{length}_vs_freetoken",
                value=ours_ms / peer_ms,
                unit="ratio",
                target="<=0.5",
                reference=f"{peer.engine}: {peer_ms:.4g} ms, same run",
                note=f"ours {ours_ms:.4g} ms, {_percent(ours)} % resident; {note}",
            )
        )
    return rows


def _hits(ours: Figures, peer: Figures) -> str:
    if ours.hit_rate is None or peer.hit_rate is None:
        return ""
    return f"; hits {100 * ours.hit_rate:.1f} % and {100 * peer.hit_rate:.1f} %"


def _numbers(figures: Figures, note: str) -> list[Row]:
    """Absolute numbers of one engine."""
    side = "freetoken" if figures.engine.startswith("FreeToken") else "ours"
    percent, engine = _percent(figures), figures.engine
    spread = f"lowest {min(figures.all_tok_s):.4g}, highest {max(figures.all_tok_s):.4g}"
    rows = [
        Row(
            id=f"peer.{side}_tok_s_{percent}",
            value=figures.tok_s,
            unit="tok/s",
            note=f"{engine}; {spread}; peak {figures.peak_vram_gib:.1f} GiB; {note}",
        ),
        *(
            Row(id=f"peer.{side}_ttft{length}_ms_{percent}", value=ms, unit="ms", note=engine)
            for length, ms in figures.ttfts_ms.items()
        ),
    ]
    if figures.hit_rate is not None:
        rows += [
            Row(id=f"peer.{side}_hit_{percent}", value=100 * figures.hit_rate, unit="%", note=engine),
            Row(id=f"peer.{side}_slots_{percent}", value=figures.slots, unit="experts", note=engine),
        ]
    return rows


def _percent(figures: Figures) -> str:
    return "all" if figures.residency == 1 else f"{100 * figures.residency:.0f}"


def _start_rows(ours: Sequence[Figures | None]) -> list[Row]:
    """The start of the first process, which compiles everything; the others find its kernels on the disk."""
    first, *others = [figures.start_s if figures else None for figures in ours]
    if first is None:
        return []
    cached = [seconds for seconds in others if seconds is not None]
    text = f"{statistics.median(cached):.3g} s" if cached else "not measured"
    note = (
        f"capturing with nothing compiled before, part of loading; with compiled kernels on the disk {text}"
    )
    return [Row(id="graph.start_s", value=first, unit="s", target="<=20", note=note)]


def measure_pairs(options: argparse.Namespace) -> Iterator[tuple[float, Pair]]:
    """Every engine at every residency, one after another; a failure is printed and gives None."""
    plain = dict(os.environ)
    path = os.pathsep.join([*filter(None, [plain.get("PYTHONPATH")]), str(options.freetoken_site)])
    with tempfile.TemporaryDirectory(prefix="triton-") as compiled:
        for residency in RESIDENCIES:
            words = _words(options, residency)
            device = ["--device", options.device]
            ours = _figures([OURS, *words, *device], plain | {"TRITON_CACHE_DIR": compiled}, options.limit)
            peer = _figures([PEER, *words], plain | {"PYTHONPATH": path}, options.limit)
            yield residency, Pair(ours, peer)


def _words(options: argparse.Namespace, residency: float) -> list[str]:
    """The options that both processes get."""
    words = [str(options.checkpoint), "--residency", str(residency)]
    words += ["--tokens", str(options.tokens), "--runs", str(options.runs)]
    if residency < 1:
        words += ["--routing", str(options.routing)]
    if residency == TTFT_RESIDENCY:
        words += ["--prompts", *map(str, options.prompts)]
    return words


def _figures(words: Sequence[str], environment: Mapping[str, str], limit_s: float) -> Figures | None:
    try:
        figures = measure_in_child(words, environment=environment, limit_s=limit_s)
    except ChildError as error:
        print(f"FAILED {' '.join(words)}: {error}", flush=True)
        return None
    print(figures, flush=True)
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the rows of what succeeded. Returns how many processes failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="of bench.models.random_checkpoint")
    parser.add_argument("--routing", type=Path, required=True, help="what bench.routing_replay recorded")
    parser.add_argument("--freetoken-site", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="of our engine")
    parser.add_argument("--tokens", type=int, default=128, help="decoded in each repetition")
    parser.add_argument("--prompts", type=int, nargs="+", default=[128, 1024], help="lengths, for the TTFT")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--limit", type=float, default=90, help="seconds that one process may take")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    options = parser.parse_args(arguments)
    facts = _facts(
        options.checkpoint, options.routing
    )  # also refuses files that do not fit, before measuring
    pairs: dict[float, Pair] = {}
    for residency, pair in measure_pairs(options):
        pairs[residency] = pair
        if rows := rows_of(pairs, facts):  # now, so that a run cut short leaves what it has
            ResultFile.write("against_freetoken", rows, folder=options.results)
    return sum(figures is None for pair in pairs.values() for figures in pair)


def _facts(checkpoint: Path, routing: Path) -> Facts:
    from bench.decode_case import model_sizes

    sizes = model_sizes(checkpoint)
    laid = RecordedRouting.load(routing).laid_over(**sizes)
    facts = RoutingFacts.of(laid, sizes["experts"])
    model = f"{sizes['layers']} layers of {sizes['experts']} experts, random weights"
    return Facts(model, f"routing replayed from recorded held-out text: {facts}")


if __name__ == "__main__":
    sys.exit(main())
