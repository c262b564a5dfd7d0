"""Why a plan does not fit, in numbers, and the smallest changes with which it would."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from hetero_runtime.config.sizes import format_size
from hetero_runtime.config.tree import ResolvedConfig
from hetero_runtime.plan.budget import Budgets, Shortage, auto_bytes
from hetero_runtime.plan.demand import TIERS, Demand, Row, Tier, fixed_rows
from hetero_runtime.plan.geometry import Geometry
from hetero_runtime.plan.hardware import Hardware
from hetero_runtime.plan.slabs import fit_slabs, least_of, slab_row

_MIB = 1 << 20

Setting = Literal["max_length", "max_rows", "pinned_prefix"]

_KEYS: dict[Setting, tuple[str, int]] = {
    "max_length": ("execution.max_length", 1),
    "max_rows": ("execution.max_rows", 1),
    "pinned_prefix": ("memory.pinned_prefix", 0),
}
"""Settings that can be lowered, with the YAML key and the least value of each."""


def explain(
    geometry: Geometry,
    config: ResolvedConfig,
    hardware: Hardware,
    *,
    budgets: Budgets,
    rows: Sequence[Row],
) -> str:
    """Why `rows` are refused, which exceed `budgets`: what each tier lacks, then what would fit."""
    shortages = _by_tier(budgets.shortages(rows), budgets)
    worst = [max(group, key=lambda s: s.missing) for group in shortages]
    changes = [
        *_smaller_settings(geometry, config, budgets),
        *_larger_budgets(worst, hardware, config),
    ]
    lines = " ".join(_line(shortage, rows, budgets) for shortage in worst)
    if changes:
        return f"the plan does not fit. {lines} What fits: {'; or '.join(changes)}."
    lacking = " and ".join(f"{format_size(s.missing)} more {_memory(s.tier, config)}" for s in worst)
    if _fits_on_a_disk(geometry, config, budgets):
        disk = "memory.backing=direct, with experts on an SSD (`hetero-runtime pack` writes them once)"
        return f"the plan does not fit. {lines} What fits: {disk}; as it is, it takes {lacking}."
    return f"the plan does not fit. {lines} No setting makes it fit on this machine: it takes {lacking}."


def _by_tier(shortages: Sequence[Shortage], budgets: Budgets) -> list[list[Shortage]]:
    """Shortages of each tier that has any. Where one memory is both, the same lack is told once."""
    groups = [[s for s in shortages if s.tier == tier] for tier in TIERS]
    if budgets.is_shared and groups[TIERS.index("host")]:
        groups.pop(TIERS.index("device"))
    return [group for group in groups if group]


def _memory(tier: Tier, config: ResolvedConfig) -> str:
    if tier == "disk":
        return "free swap (swapon)"
    if config.device == "unified":
        return "memory"
    return "GPU memory" if tier == "device" and config.device == "cuda" else "host RAM"


def _line(shortage: Shortage, rows: Sequence[Row], budgets: Budgets) -> str:
    """`device, decode: needs 26.1 GiB of 22.4 GiB allowed, 3.7 GiB too much (slabs 20.0 GiB, ...).`"""
    mine = budgets.counted(rows, shortage.tier)
    largest = sorted(mine, key=lambda row: -row.at(shortage.phase))[:4]
    parts = ", ".join(f"{row.name} {format_size(row.at(shortage.phase))}" for row in largest)
    return (
        f"{shortage.tier}, {shortage.phase}: needs {format_size(shortage.needed)} of "
        f"{format_size(shortage.limit)} allowed, {format_size(shortage.missing)} too much ({parts})."
    )


def _smaller_settings(geometry: Geometry, config: ResolvedConfig, budgets: Budgets) -> Iterator[str]:
    """Fewer slabs if that is enough, else each other setting that can be lowered far enough alone."""
    demand, pool = Demand.of(config), config.memory.pool
    least = least_of(geometry, pool, demand)
    if config.memory.slabs > least and _fits(geometry, config, budgets, demand):
        yield f"memory.slabs={fit_slabs(geometry, demand, budgets, pool)}"
        return
    also = f" with memory.slabs={least}" if config.memory.slabs > least else ""
    for field, (key, lowest) in _KEYS.items():
        value = _largest_that_fits(geometry, config, budgets, field=field, lowest=lowest)
        if value is not None:
            yield f"{key}={value}{also}"


def _fits_on_a_disk(geometry: Geometry, config: ResolvedConfig, budgets: Budgets) -> bool:
    """Whether `memory.backing: direct` may be, and is enough."""
    if config.memory.backing != "ram" or config.misses.handler != "load" or config.execution.mode == "graph":
        return False
    host_slabs = geometry.top_k if config.device == "cuda" else 0
    demand = replace(Demand.of(config), backing="direct", is_packed=False, host_slabs=host_slabs)
    return _fits(geometry, config, budgets, demand)


def _largest_that_fits(
    geometry: Geometry,
    config: ResolvedConfig,
    budgets: Budgets,
    *,
    field: Setting,
    lowest: int,
) -> int | None:
    """The largest value of `field` below the present one with which the fewest legal slabs fit."""
    demand = Demand.of(config)
    low, high = lowest, getattr(demand, field) - 1
    if high < low or not _fits(geometry, config, budgets, _with(demand, field, low)):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        if _fits(geometry, config, budgets, _with(demand, field, middle)):
            low = middle
        else:
            high = middle - 1
    return low


def _with(demand: Demand, field: Setting, value: int) -> Demand:
    if field == "max_length":
        return replace(demand, max_length=value)
    if field == "max_rows":
        return replace(demand, max_rows=value)
    return replace(demand, pinned_prefix=value)


def _fits(geometry: Geometry, config: ResolvedConfig, budgets: Budgets, demand: Demand) -> bool:
    """Whether `demand` fits with the fewest legal slabs."""
    least = least_of(geometry, config.memory.pool, demand)
    return not budgets.shortages([*fixed_rows(geometry, demand), slab_row(geometry, least)])


def _larger_budgets(worst: Sequence[Shortage], hardware: Hardware, config: ResolvedConfig) -> Iterator[str]:
    """Raising `memory.gpu` or `memory.host`, where that stays within what `auto` would allow."""
    settings = []
    for shortage in worst:
        if shortage.tier == "disk":
            return
        gpu = hardware.gpu if shortage.tier == "device" and config.device == "cuda" else None
        free, total = (
            (gpu.free_bytes, gpu.total_bytes)
            if gpu is not None
            else (hardware.ram_available_bytes, hardware.ram_total_bytes)
        )
        if shortage.needed > auto_bytes(free, total):
            return
        key = "memory.gpu" if shortage.tier == "device" else "memory.host"
        settings.append(f"{key}={-(-shortage.needed // _MIB)}MiB ({format_size(free)} are free now)")
    yield " and ".join(settings)
