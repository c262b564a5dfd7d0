"""Results for a reader (a table) and for a program (a dict that json can write)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hetero_runtime.trace.file import TraceInfo
from hetero_scheduler.simulator import Scenario, SimulationResult


def policy_name(scenario: Scenario) -> str:
    """What a line of a plot is called: `lru`, or `belady + jsd (oracle)`."""
    parts = [scenario.eviction] + ([scenario.schedule] if scenario.schedule != "none" else [])
    forecast = f" ({scenario.predictor})" if scenario.predictor != "none" else ""
    return " + ".join(parts) + forecast


def trace_line(results: Sequence[SimulationResult], info: TraceInfo) -> str:
    """What the trace is, and whether a hit rate on it means something."""
    decoding = info.decoding + (f" at {info.temperature:g}" if info.decoding == "sampled" else "")
    return (
        f"{info.model}, {decoding}: {results[0].tokens:,} tokens counted, "
        f"load entropy {results[0].load_entropy:.3f} (1: every expert alike)"
    )


def machine_line(results: Sequence[SimulationResult]) -> str:
    """The machine that is imagined."""
    machine = results[0].scenario.machine
    return (
        f"a layer takes {machine.layer_ms:g} ms, an expert of {machine.record_bytes / 1e6:.1f} MB takes "
        f"{machine.record_ms:.3f} ms at {machine.link_gb_s:g} GB/s, {machine.copies_in_flight} in flight"
    )


def render_results(results: Sequence[SimulationResult], info: TraceInfo) -> RenderableType:
    """A row for each result."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("pool", "policies", "resident"):
        table.add_column(name, justify="right" if name == "resident" else "left")
    for name in (
        "hit rate",
        "static",
        "late",
        "misses",
        "precision",
        "wasted",
        "stall",
        "full load",
        "tokens/s",
    ):
        table.add_column(name, justify="right")
    last = None
    for result in results:
        scenario = result.scenario
        group = scenario.pool, policy_name(scenario)
        if group != last:
            table.add_section()
        table.add_row(*(group if group != last else ("", "")), f"{scenario.residency:.0%}", *_cells(result))
        last = group
    legend = (
        "static: a cache that never changes and knew the most used experts · wasted: prefetched and never "
        "required · stall: a token · full load: share of the speed with everything resident"
    )
    return Group(
        Text(trace_line(results, info)), Text(machine_line(results)), table, Text(legend, style="dim")
    )


def to_json(results: Sequence[SimulationResult], info: TraceInfo) -> dict[str, Any]:
    """Where the trace comes from, and one flat row for each result."""
    return {"trace": asdict(info), "rows": [result.to_json() for result in results]}


def _cells(result: SimulationResult) -> list[str]:
    counts = result.counts
    has_prefetch = counts.prefetches > 0
    return [
        f"{result.hit_rate:.1%}",
        f"{result.static_hit_rate:.1%}",
        f"{counts.late / counts.required:.1%}" if has_prefetch else "-",
        f"{counts.misses / counts.required:.1%}",
        f"{result.precision:.1%}" if has_prefetch else "-",
        f"{result.bytes_wasted / 1e9:,.1f} GB" if has_prefetch else "-",
        f"{counts.stall_ms / result.tokens:,.2f} ms",
        f"{result.full_load_share:.1%}",
        f"{result.tok_s:,.1f}",
    ]
