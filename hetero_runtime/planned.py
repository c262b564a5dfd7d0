"""A configuration decided for this machine and its model, with the memory plan that says it fits."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from hetero_runtime.config import Config, ResolvedConfig, model_dir, resolve
from hetero_runtime.plan import MemoryPlan, detect, make_plan, read_geometry
from hetero_runtime.plan.slabs import least_slabs


class Planned(NamedTuple):
    """What `assemble` loads, and what it will take."""

    config: ResolvedConfig
    memory: MemoryPlan


def plan_for(config: Config) -> Planned:
    """Decide and plan, in well under a second and without torch.

    Raises ConfigError, CheckpointError, or BudgetError with the smallest change that would fit.
    """
    geometry, hardware = read_geometry(model_dir(config)), detect(config.device)
    resolved = resolve(config, hardware, geometry)
    return Planned(resolved, make_plan(geometry, resolved, hardware))


def three_residencies(config: Config) -> list[Config]:
    """`config` with the fewest slabs that are legal, a quarter of the experts, and all of them; alone, if it
    says itself how many."""
    memory = config.memory
    if memory.slabs != "auto" or memory.residency is not None:
        return [config]
    geometry = read_geometry(model_dir(config))
    least = least_slabs(geometry, memory.pool, 0)
    quarter = max(least, geometry.num_routed_experts // 4)
    return [
        replace(config, memory=replace(memory, slabs=slabs))
        for slabs in dict.fromkeys((least, quarter, geometry.num_routed_experts))
    ]
