"""Results for a reader (a table) and for a program (a dict that json can write)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any, NamedTuple

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
    overtaken = ", overtaken by demands" if machine.overtakes else ""
    return (
        f"a layer takes {machine.layer_ms:g} ms, an expert of {machine.record_bytes / 1e6:.1f} MB takes "
        f"{machine.record_ms:.3f} ms at {machine.link_gb_s:g} GB/s, {machine.copies_in_flight} in flight"
        f"{overtaken}"
    )


def render_results(results: Sequence[SimulationResult], info: TraceInfo) -> RenderableType:
    """A table for each policy, a row for each residency; columns on prefetching only where there was any."""
    has_prefetch = any(result.counts.prefetches for result in results)
    columns = [column for column in _COLUMNS if has_prefetch or not column.is_about_prefetch]
    legend = (
        "static: a cache that never changes and knew the most used experts · useful: share of the prefetches "
        "that were required, wasted: the rest · stall: a token · of full: share of all-resident speed"
    )
    return Group(
        Text(trace_line(results, info)),
        Text(machine_line(results)),
        *(_table(title, list(group), columns) for title, group in groupby(results, key=_title)),
        Text(legend, style="dim"),
    )


def _title(result: SimulationResult) -> str:
    return f"{policy_name(result.scenario)}, {result.scenario.pool}"


def _table(title: str, results: Sequence[SimulationResult], columns: Sequence[_Column]) -> Table:
    table = Table(
        box=None, pad_edge=False, padding=(0, 0, 0, 1), title=title, title_justify="left", header_style="bold"
    )
    for column in columns:
        table.add_column(column.name, justify="right", no_wrap=True)
    for result in results:
        table.add_row(*(column.cell(result) for column in columns))
    return table


def to_json(results: Sequence[SimulationResult], info: TraceInfo) -> dict[str, Any]:
    """Where the trace comes from, and one flat row for each result."""
    return {"trace": asdict(info), "rows": [result.to_json() for result in results]}


class _Column(NamedTuple):
    name: str
    cell: Callable[[SimulationResult], str]
    is_about_prefetch: bool = False


def _share(part: int, result: SimulationResult) -> str:
    return f"{part / result.counts.required:.1%}"


_COLUMNS = (
    _Column("resident", lambda r: f"{r.scenario.residency:.0%}"),
    _Column("hits", lambda r: f"{r.hit_rate:.1%}"),
    _Column("static", lambda r: f"{r.static_hit_rate:.1%}"),
    _Column("late", lambda r: _share(r.counts.late, r), is_about_prefetch=True),
    _Column("misses", lambda r: _share(r.counts.misses, r)),
    _Column("useful", lambda r: f"{r.precision:.1%}", is_about_prefetch=True),
    _Column("wasted", lambda r: f"{r.bytes_wasted / 1e9:,.1f} GB", is_about_prefetch=True),
    _Column("stall", lambda r: f"{r.counts.stall_ms / r.tokens:,.2f} ms"),
    _Column("of full", lambda r: f"{r.full_load_share:.1%}"),
    _Column("tok/s", lambda r: f"{r.tok_s:,.1f}"),
)
