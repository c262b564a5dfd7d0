"""The captured decode step against the eager one: same model, same slabs, same recorded routing, one run.

`python -m bench.graph_decode --routing routing.safetensors [--checkpoint FOLDER]`; model and routing are
those of `bench/eager_decode.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.decode_case import Case, Measured, measure_case
from bench.eager_decode import free_device, parse, prepare
from bench.harness import ResultFile, Row
from bench.routing import RoutingFacts
from hetero_gpu.link import measure_link

DEVICE = "cuda"
CASES = (
    Case("lru", 1.0, "graph"),
    Case("lru", 0.45, "graph"),
    Case("lru", 0.45, "eager"),
    Case("lru", 0.25, "graph"),
)


def rows_of(done: Sequence[Measured], facts: RoutingFacts, *, layers: int, link_gb_s: float) -> list[Row]:
    """Speeds, hits and bytes of the captured step, with the eager one as the reference."""
    note = f"{layers} layers, random weights, routing replayed from recorded held-out text; {facts}"
    speeds = {(measured.case.mode, measured.case.residency): measured.tok_s for measured in done}
    rows: list[Row] = []
    for measured in done:
        case = measured.case
        if case.mode != "graph":
            continue
        eager = speeds.get(("eager", case.residency))
        spread = f"lowest {min(measured.all_tok_s):.4g}, highest {max(measured.all_tok_s):.4g}"
        reference = f"eager in the same run: {eager:.3g} tok/s" if eager else None
        rows.append(
            Row(
                id=f"graph.tok_s_{case.percent}",
                value=measured.tok_s,
                unit="tok/s",
                reference=reference,
                note=f"{note}; {spread}",
            )
        )
        if eager:
            rows.append(
                Row(id=f"graph.over_eager_{case.percent}", value=measured.tok_s / eager, unit="ratio")
            )
        if case.residency < 1:
            rows += _offload_rows(measured, link_gb_s)
    return rows


def _offload_rows(measured: Measured, link_gb_s: float) -> list[Row]:
    percent, moved = measured.case.percent, measured.bytes_token
    limit = link_gb_s * 1e9 / moved if moved else float("inf")
    return [
        Row(id=f"graph.lru_hit_{percent}", value=100 * measured.hit_rate, unit="%"),
        Row(
            id=f"graph.over_link_{percent}",
            value=measured.tok_s / limit,
            unit="ratio",
            reference=f"link alone, {link_gb_s:.0f} GB/s: {limit:.4g} tok/s for {moved / 1e6:.0f} MB a token",
        ),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure case by case; what was measured is written even when a later case fails."""
    options = parse(arguments, __doc__)
    plan, routing, geometry = prepare(options)
    done: list[Measured] = []
    try:
        for case in CASES:
            done.append(measure_case(plan, case, routing))
            print(done[-1], flush=True)
            free_device()
    finally:
        if done:
            facts = RoutingFacts.of(routing, geometry.experts)
            link_gb_s = measure_link().pinned or 0.0
            rows = rows_of(done, facts, layers=geometry.layers, link_gb_s=link_gb_s)
            ResultFile.write("graph_decode", rows, folder=options.results)


if __name__ == "__main__":
    main()
