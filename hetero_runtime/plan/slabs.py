"""How many slabs: the one place that counts them, for `resolve` and for the plan alike."""

from __future__ import annotations

import math

from hetero_runtime.config.sizes import format_size
from hetero_runtime.config.tree import MemoryConfig, Pool
from hetero_runtime.errors import BudgetError, ConfigError
from hetero_runtime.plan.budget import Budgets
from hetero_runtime.plan.demand import PHASES, Demand, Row, fixed_rows, returning_records
from hetero_runtime.plan.geometry import Geometry


def most_slabs(geometry: Geometry, pinned_prefix: int) -> int:
    """Slabs with which every expert outside the pinned prefix is resident: `all`."""
    return (geometry.num_moe_layers - pinned_prefix) * geometry.num_experts


def least_slabs(geometry: Geometry, pool: Pool, pinned_prefix: int, *, needs_slabs: bool = True) -> int:
    """The smallest legal number: a token's top-k experts of one layer (per_layer: of each) at once; none
    where the CPU computes what is not resident."""
    if not needs_slabs:
        return 0
    layers = geometry.num_moe_layers - pinned_prefix
    return geometry.top_k * (layers if pool == "per_layer" else min(layers, 1))


def least_of(geometry: Geometry, pool: Pool, demand: Demand) -> int:
    """The smallest legal number under `demand`."""
    if demand.slabs_are_bank:
        return most_slabs(geometry, demand.pinned_prefix)
    return least_slabs(geometry, pool, demand.pinned_prefix, needs_slabs=demand.needs_slabs)


def fit_slabs(geometry: Geometry, demand: Demand, budgets: Budgets, pool: Pool) -> int:
    """The most slabs that fit beside everything else, in every phase; 0 when none does."""
    room = budgets.room(fixed_rows(geometry, demand))
    count = min(max(0, room) // geometry.record_bytes, most_slabs(geometry, demand.pinned_prefix))
    return _whole_layers(count, geometry, demand.pinned_prefix) if pool == "per_layer" else count


def choose_slabs(memory: MemoryConfig, geometry: Geometry, demand: Demand, budgets: Budgets) -> int:
    """The number of slabs that `memory.slabs` or `memory.residency` means.

    `auto` never gives fewer than is legal; whether that many fit is for `make_plan` to say, with the
    numbers. Raises BudgetError for a number below the legal one, ConfigError for one that cannot be.
    """
    most = most_slabs(geometry, demand.pinned_prefix)
    if demand.slabs_are_bank:
        return _all_of_bank(memory, most)
    if memory.residency is not None:
        return _from_residency(memory.residency, memory.pool, geometry, demand)
    if memory.slabs == "all":
        return most
    if memory.slabs == "auto":
        return max(least_of(geometry, memory.pool, demand), fit_slabs(geometry, demand, budgets, memory.pool))
    _check_count(memory.slabs, memory.pool, geometry, demand)
    return memory.slabs


def choose_host_slabs(memory: MemoryConfig, geometry: Geometry, demand: Demand, budgets: Budgets) -> int:
    """The number of host slabs that `memory.host_slabs` means; 0 where the device's slabs, or the bank, are
    in host memory already. Raises ConfigError for a number that cannot be."""
    has_any = demand.backing != "ram" and demand.device == "cuda"
    least, most = (geometry.top_k, geometry.num_routed_experts) if has_any else (0, 0)
    if memory.host_slabs != "auto":
        if least <= memory.host_slabs <= most:
            return memory.host_slabs
        raise ConfigError(
            f"memory.host_slabs={memory.host_slabs} cannot be with memory.backing: {demand.backing} on "
            f"device {demand.device}: at least {least}, at most {most}; leave it out"
        )
    if not has_any or demand.backing != "direct":
        return least
    used = max(budgets.used(fixed_rows(geometry, demand), "host", phase) for phase in PHASES)
    room = max(0, budgets.host - used) // geometry.record_bytes
    return min(max(least, room - returning_records(demand.backing, room)), most)


def slab_row(geometry: Geometry, slabs: int, *, are_bank: bool = False) -> Row:
    """The slabs' row of the plan. `are_bank`: it is also that of the bank."""
    note = f"{slabs} × {format_size(geometry.record_bytes)}"
    note += ", where they were loaded: nothing is copied" if are_bank else ""
    return Row.constant("slabs", "device", slabs * geometry.record_bytes, note)


def _all_of_bank(memory: MemoryConfig, most: int) -> int:
    """Raises ConfigError for any other number: a slab less would free nothing."""
    if memory.residency in (None, 1.0) and memory.slabs in ("auto", "all", most):
        return most
    said = f"slabs: {memory.slabs}" if memory.residency is None else f"residency: {memory.residency}"
    raise ConfigError(
        f"memory.{said} with device: unified and memory.backing: ram: the GPU computes experts where they "
        f"were loaded, so all {most} are there; leave it out, or write memory.backing: direct"
    )


def _from_residency(residency: float, pool: Pool, geometry: Geometry, demand: Demand) -> int:
    """A share of all routed experts, rounded down (half an expert less never misses a legal minimum)."""
    total, pinned_prefix = geometry.num_routed_experts, demand.pinned_prefix
    count = min(math.floor(residency * total + 1e-6), most_slabs(geometry, pinned_prefix))
    if pool == "per_layer":
        count = _whole_layers(count, geometry, pinned_prefix)
    least = least_of(geometry, pool, demand)
    if count < least:
        smallest = math.ceil(least / total * 1e4) / 1e4
        raise BudgetError(
            f"memory.residency={residency} is {count} slabs; the smallest legal residency is {smallest} "
            f"({least} slabs): {_why_least(geometry, pool)}"
        )
    return count


def _check_count(slabs: int, pool: Pool, geometry: Geometry, demand: Demand) -> None:
    least, most = least_of(geometry, pool, demand), most_slabs(geometry, demand.pinned_prefix)
    layers = geometry.num_moe_layers - demand.pinned_prefix
    if slabs < least:
        without = " (running without any slab needs misses.handler: cpu)" if slabs == 0 else ""
        raise BudgetError(
            f"memory.slabs={slabs} is too few: the smallest legal number is {least}, "
            f"{_why_least(geometry, pool)}{without}"
        )
    if slabs > most:
        raise ConfigError(
            f"memory.slabs={slabs} is more than the {most} routed experts that are not pinned; "
            f"write memory.slabs=all"
        )
    if pool == "per_layer" and layers and slabs % layers:
        below = slabs // layers * layers
        raise ConfigError(
            f"memory.slabs={slabs} does not divide evenly over {layers} layers, which memory.pool=per_layer "
            f"needs; write {below} or {below + layers}"
        )


def _why_least(geometry: Geometry, pool: Pool) -> str:
    where = "each layer" if pool == "per_layer" else "a layer"
    return f"a token needs {geometry.top_k} experts of {where} at once"


def _whole_layers(count: int, geometry: Geometry, pinned_prefix: int) -> int:
    layers = geometry.num_moe_layers - pinned_prefix
    return count // layers * layers if layers else 0
