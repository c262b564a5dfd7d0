"""A configuration decided for this machine and its model, with the memory plan that says it fits."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from hetero_runtime.calibration import locate_calibration, locate_profile
from hetero_runtime.config import Config, ResolvedConfig, model_dir, resolve, settle_mode
from hetero_runtime.config.forecasts import schedules_forecasts
from hetero_runtime.config.tree import Horizon, slabs_are_bank
from hetero_runtime.config.unified import choose_device
from hetero_runtime.lookahead.locate import locate_lookahead
from hetero_runtime.plan import MemoryPlan, detect, make_plan, read_geometry
from hetero_runtime.plan.drafter import read_drafter
from hetero_runtime.plan.geometry import Geometry
from hetero_runtime.plan.hardware import Hardware
from hetero_runtime.plan.quantized import quantized
from hetero_runtime.plan.slabs import least_slabs
from hetero_runtime.prediction.locate import locate_predictor
from hetero_runtime.tiers.locate import locate_expert_file


class Planned(NamedTuple):
    """What `assemble` loads, and what it will take."""

    config: ResolvedConfig
    memory: MemoryPlan


class Decided(NamedTuple):
    """A configuration without `auto`, and what decided it."""

    config: ResolvedConfig
    geometry: Geometry
    hardware: Hardware
    why_eager: str | None = None
    """Why `execution.mode: auto` is eager on a GPU; None where it is not."""


def plan_for(config: Config) -> Planned:
    """Decide and plan, in well under a second and without torch.

    Raises ConfigError, CheckpointError, or BudgetError with the smallest change that would fit.
    """
    decided = decide(config)
    memory = make_plan(decided.geometry, decided.config, decided.hardware)
    return Planned(decided.config, replace(memory, why_eager=decided.why_eager))


def decide(config: Config) -> Decided:
    """Every `auto` decided; whether it fits is not asked, but for the step that `auto` may capture. Raises as
    `plan_for`."""
    geometry, hardware = read_geometry(model_dir(config)), detect(config.device)
    geometry = quantized(geometry, config.model.experts)
    predictor = locate_predictor(config.prediction, geometry)
    if predictor is not None:
        geometry = replace(geometry, predictor_bytes=predictor.num_bytes)
        config = replace(config, prediction=replace(config.prediction, path=str(predictor.path)))
    lookahead = locate_lookahead(config.prediction, geometry, device=choose_device(config, hardware))
    if lookahead is not None:
        geometry = replace(geometry, lookahead=lookahead.geometry)
        config = replace(config, prediction=replace(config.prediction, path=str(lookahead.path)))
    geometry = replace(geometry, drafter=read_drafter(config.speculation, geometry))
    calibration = locate_calibration(config.routing, geometry)
    if calibration is not None:
        geometry = replace(geometry, calibration_bytes=calibration.stat().st_size)
        config = replace(config, routing=replace(config.routing, calibration=str(calibration)))
    profile = locate_profile(config.prefetch, geometry)
    config = replace(config, prefetch=replace(config.prefetch, popularity=str(profile or "none")))
    expert_file = locate_expert_file(config, geometry)
    if expert_file is not None:
        config = replace(config, memory=replace(config.memory, expert_file=str(expert_file)))
        geometry = replace(geometry, source_record_bytes=0)  # nothing is quantised any more
    config, why_eager = settle_mode(config, hardware, geometry)
    if predictor is not None:
        horizon = _horizon(config, hardware, predictor.horizons)
        config = replace(config, prediction=replace(config.prediction, horizon=horizon))
    return Decided(resolve(config, hardware, geometry), geometry, hardware, why_eager)


def _horizon(config: Config, hardware: Hardware, learned: tuple[Horizon, ...]) -> Horizon:
    """`auto` is the nearest one where forecasts lead to transfers that overlap with computation. Where they
    decide evictions alone a step ahead says as much, and a captured step has so little time for transfers
    that nearer forecasts cost more than they bring (`bench/NOTES.md`, forecasts in the captured step)."""
    if config.prediction.horizon != "auto":
        return config.prediction.horizon
    has_link = choose_device(config, hardware) == "cuda"
    reads_disk = config.memory.backing in ("direct", "mmap")
    is_fetching = (has_link or reads_disk) and schedules_forecasts(config.prefetch.schedule)
    return learned[-1] if is_fetching and config.execution.mode != "graph" else "step"


def three_residencies(config: Config) -> list[Config]:
    """`config` with the fewest slabs that are legal, a quarter of the experts, and all of them; alone, if it
    says itself how many, or all are where they were loaded."""
    memory = config.memory
    if memory.slabs != "auto" or memory.residency is not None:
        return [config]
    if slabs_are_bank(choose_device(config, detect(config.device)), memory.backing):
        return [config]
    geometry = read_geometry(model_dir(config))
    least = least_slabs(geometry, memory.pool, 0, needs_slabs=config.misses.handler != "cpu")
    quarter = max(least, geometry.num_routed_experts // 4)
    return [
        replace(config, memory=replace(memory, slabs=slabs))
        for slabs in dict.fromkeys((least, quarter, geometry.num_routed_experts))
    ]
