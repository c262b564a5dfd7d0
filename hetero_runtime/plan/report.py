"""A plan for a reader (a table) and for a program (a dict that json can write)."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hetero_runtime.config.sizes import format_size
from hetero_runtime.plan.budget import NO_LIMIT
from hetero_runtime.plan.demand import PHASES, TIERS, Row, Tier
from hetero_runtime.plan.geometry import ITEMSIZE
from hetero_runtime.plan.planner import MemoryPlan


def render_plan(plan: MemoryPlan) -> RenderableType:
    """The plan as a rich table, with the model above it and the notes below."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for phase in PHASES:
        table.add_column(phase, justify="right")
    table.add_column("")
    for tier in _tiers(plan):
        _add_tier(table, plan, tier)
    lines = (_model_line(plan), _machine_line(plan), _mode_line(plan))
    return Group(*(Text(line) for line in lines), table, *_notes(plan))


def _add_tier(table: Table, plan: MemoryPlan, tier: Tier) -> None:
    table.add_section()
    table.add_row(f"[bold]{_tier_title(plan, tier)}[/]")
    is_whole = tier == "host" and plan.config.device == "unified"
    for row in plan.budgets.counted(plan.rows, tier) if is_whole else plan.rows:
        if is_whole or row.tier == tier:
            table.add_row(f"  {row.name}", *_cells(row), f"[dim]{row.note}[/]")
    used = [format_size(plan.used_bytes(tier, phase)) for phase in PHASES]
    limit = plan.budgets.limit(tier)
    note = "is there already" if limit == NO_LIMIT else f"of {format_size(limit)} allowed"
    table.add_row("  [bold]in all[/]", *used, note)


def to_json(plan: MemoryPlan) -> dict[str, Any]:
    """The plan in bytes: rows, peaks and budgets by tier and phase, and the numbers of the model."""
    geometry = plan.geometry
    return {
        "model": {
            "path": str(geometry.path),
            "type": geometry.model_type,
            "num_moe_layers": geometry.num_moe_layers,
            "num_experts": geometry.num_experts,
            "top_k": geometry.top_k,
            "record_bytes": geometry.record_bytes,
            "kv_bytes_per_token": geometry.kv.bytes_per_token(ITEMSIZE[plan.config.model.dtype]),
            "max_context": geometry.max_context,
        },
        "device": plan.config.device,
        "mode": plan.config.execution.mode,
        "why_eager": plan.why_eager,
        "dtype": plan.config.model.dtype,
        "backing": plan.config.memory.backing,
        "slabs": plan.config.memory.slabs,
        "host_slabs": plan.config.memory.host_slabs,
        "residency": plan.residency,
        "bank_bytes": plan.bank_bytes,
        "is_packed": plan.config.memory.packed,
        "rows": [
            {"name": row.name, "tier": row.tier, **{f"{phase}_bytes": row.at(phase) for phase in PHASES}}
            for row in plan.rows
        ],
        "used_bytes": {tier: {phase: plan.used_bytes(tier, phase) for phase in PHASES} for tier in TIERS},
        "allowed_bytes": {
            tier: plan.budgets.limit(tier) for tier in TIERS if plan.budgets.limit(tier) < NO_LIMIT
        },
        "ram_total_bytes": plan.hardware.ram_total_bytes,
        "ram_available_bytes": plan.hardware.ram_available_bytes,
        "gpu_total_bytes": plan.hardware.gpu.total_bytes if plan.hardware.gpu else 0,
        "gpu_free_bytes": plan.hardware.gpu.free_bytes if plan.hardware.gpu else 0,
        "notes": list(geometry.notes),
    }


def _tiers(plan: MemoryPlan) -> list[Tier]:
    """Those with a table of their own. Unified memory has one, of everything."""
    shown = [tier for tier in TIERS if tier != "disk" or any(row.tier == tier for row in plan.rows)]
    return [tier for tier in shown if tier != "device" or plan.config.device != "unified"]


def _tier_title(plan: MemoryPlan, tier: Tier) -> str:
    if tier == "device":
        return "device: cpu" if plan.config.device == "cpu" else f"device ({plan.config.device})"
    if tier == "disk":
        return "swap" if plan.config.memory.backing == "swap" else "disk"
    if plan.config.device == "unified":
        return "unified memory"
    return "host + device" if plan.budgets.is_shared else "host"


def _cells(row: Row) -> list[str]:
    return [format_size(row.at(phase)) if row.at(phase) else "-" for phase in PHASES]


def _model_line(plan: MemoryPlan) -> str:
    geometry = plan.geometry
    return (
        f"{geometry.path.name or geometry.path} ({geometry.model_type}): {geometry.num_moe_layers} MoE "
        f"layers × {geometry.num_experts} experts, top-{geometry.top_k}; {plan.config.memory.slabs} slabs, "
        f"{plan.residency:.1%} resident"
    )


def _machine_line(plan: MemoryPlan) -> str:
    hardware = plan.hardware
    ram = f"{format_size(hardware.ram_available_bytes)} of {format_size(hardware.ram_total_bytes)} RAM free"
    if hardware.gpu is None:
        return f"{ram}; no GPU: {hardware.no_gpu_reason}" if hardware.no_gpu_reason else ram
    gpu = hardware.gpu
    if gpu.is_integrated:
        return f"{gpu.name}, in the host's memory; {ram}"
    return f"{gpu.name}: {format_size(gpu.free_bytes)} of {format_size(gpu.total_bytes)} free; {ram}"


def _mode_line(plan: MemoryPlan) -> str:
    """How decode steps will run, and, where that is not the fastest way, why."""
    if plan.config.execution.mode == "graph":
        return "decode: graph, the whole step captured"
    if plan.why_eager is not None:
        return f"decode: eager, since a captured step cannot be: {plan.why_eager}"
    return "decode: eager"


def _notes(plan: MemoryPlan) -> list[Text]:
    notes = list(plan.geometry.notes)
    gpu = plan.hardware.gpu
    if plan.config.device == "unified" and gpu is not None and not gpu.is_integrated:
        notes.append(f"{gpu.name} has memory of its own: every read of an expert crosses the link, each time")
    return [Text(f"note: {note}", style="dim") for note in notes]
