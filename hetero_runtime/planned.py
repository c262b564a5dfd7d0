"""A configuration decided for this machine and its model, with the memory plan that says it fits."""

from __future__ import annotations

from typing import NamedTuple

from hetero_runtime.config import Config, ResolvedConfig, model_dir, resolve
from hetero_runtime.plan import MemoryPlan, detect, make_plan, read_geometry


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
