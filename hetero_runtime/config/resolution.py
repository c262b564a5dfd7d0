"""The one place that knows `auto`, but that of the mode (`mode.py`): a Config becomes a ResolvedConfig."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import yaml

from hetero_runtime.config.available import check_available
from hetero_runtime.config.routing import resolve_routing
from hetero_runtime.config.tree import (
    Config,
    Device,
    ExecutionConfig,
    MemoryConfig,
    Mode,
    ResolvedConfig,
    ResolvedCpu,
    ResolvedExecution,
    ResolvedMemory,
    ResolvedModel,
)
from hetero_runtime.config.unified import check_unified, choose_device
from hetero_runtime.config.vision import resolve_vision
from hetero_runtime.errors import ConfigError
from hetero_runtime.plan.budget import make_budgets
from hetero_runtime.plan.demand import Demand, drafted_tokens, prefetches_in_graph
from hetero_runtime.plan.geometry import Geometry
from hetero_runtime.plan.hardware import Hardware
from hetero_runtime.plan.prefix import with_prefix
from hetero_runtime.plan.slabs import choose_host_slabs, choose_slabs


def resolve(config: Config, hardware: Hardware, geometry: Geometry) -> ResolvedConfig:
    """Decide every `auto` but that of the mode, which `settle_mode` decides before by asking this. Pure: the
    same three arguments give the same result.

    Whether the result fits is for `hetero_runtime.plan.make_plan` to say; call it next. Raises ConfigError
    for what this machine or model cannot do, BudgetError for fewer slabs than are legal.
    """
    check_available(config)
    device = choose_device(config, hardware)
    check_unified(config, device)
    cpu = ResolvedCpu(_threads(config, hardware), config.cpu.isa, config.cpu.backend)
    demand = Demand(
        device=device,
        dtype=geometry.dtype if config.model.dtype == "auto" else config.model.dtype,
        max_rows=config.execution.max_rows,
        max_length=_max_length(config.execution, geometry),
        pinned_prefix=_pinned_prefix(config.memory, geometry),
        mode=_mode(config.execution, device),
        is_packed=_is_packed(config.memory, device, geometry),
        threads=cpu.threads,
        is_prefetched_in_graph=prefetches_in_graph(config),
        num_drafted=drafted_tokens(config),
        backing=config.memory.backing,
        misses=config.misses.handler,
        backend=cpu.backend,
        workers=cpu.workers,
    )
    settings = config.memory
    if _needs_prefix(config, geometry):
        budgets = make_budgets(settings, hardware, device)
        settings, pinned = with_prefix(settings, geometry, demand, budgets)
        demand = replace(demand, pinned_prefix=pinned)
    vision = resolve_vision(config, geometry, pinned_prefix=demand.pinned_prefix)
    memory = _memory(settings, hardware, geometry, demand=demand)
    return ResolvedConfig(
        preset="lru" if config.preset == "auto" else config.preset,
        model=ResolvedModel(geometry.path, config.model.experts, demand.dtype),
        device=demand.device,
        memory=memory,
        routing=resolve_routing(config.routing, geometry, slabs=memory.slabs),
        prediction=config.prediction,
        prefetch=config.prefetch,
        eviction=config.eviction,
        misses=config.misses,
        execution=ResolvedExecution(
            mode=demand.mode,
            compile=config.execution.compile,
            max_rows=demand.max_rows,
            max_length=demand.max_length,
        ),
        cpu=cpu,
        vision=vision,
        speculation=config.speculation,
    )


def render(resolved: ResolvedConfig) -> str:
    """The resolved tree as YAML, which `load_config` reads back to the same decisions."""
    tree: dict[str, Any] = asdict(resolved)
    tree["model"]["path"] = str(resolved.model.path)
    return yaml.safe_dump(tree, sort_keys=False, default_flow_style=False)


def _mode(execution: ExecutionConfig, device: Device) -> Mode:
    assert execution.mode != "auto", "settle_mode decides it before"
    if execution.mode == "graph" and device == "cpu":
        raise ConfigError(
            "execution.mode: graph needs a CUDA device, and device is cpu; write execution.mode: eager"
        )
    return execution.mode


def _max_length(execution: ExecutionConfig, geometry: Geometry) -> int:
    """The default bows to a model with a shorter context; a length that was asked for does not."""
    if execution.max_length <= geometry.max_context:
        return execution.max_length
    if execution.max_length == ExecutionConfig.max_length:
        return geometry.max_context
    raise ConfigError(
        f"execution.max_length={execution.max_length} is over the model's context of "
        f"{geometry.max_context} tokens; write {geometry.max_context} or less"
    )


def _pinned_prefix(memory: MemoryConfig, geometry: Geometry) -> int:
    """What was asked for; `auto` counts as none yet."""
    if memory.pinned_prefix == "auto":
        return 0
    if memory.pinned_prefix == "all":
        return geometry.num_moe_layers
    if memory.pinned_prefix > geometry.num_moe_layers:
        raise ConfigError(
            f"memory.pinned_prefix={memory.pinned_prefix} is more than the model's {geometry.num_moe_layers} "
            f"MoE layers; write {geometry.num_moe_layers} or all"
        )
    return memory.pinned_prefix


def _needs_prefix(config: Config, geometry: Geometry) -> bool:
    """Whether `memory.pinned_prefix: auto` is worth slabs: something acts on the routing of first layers."""
    drops_tokens = config.vision.keep_ratio != 1 and geometry.vision.float_elements > 0
    acts_on_it = drops_tokens or config.prediction.predictor == "lookahead_mlp"
    return config.memory.pinned_prefix == "auto" and acts_on_it


def _is_packed(memory: MemoryConfig, device: Device, geometry: Geometry) -> bool:
    """`auto` packs wherever it can: a device that decodes, and records that get smaller."""
    if memory.packed is not True:
        if memory.backing != "ram":
            return False
        return memory.packed == "auto" and device == "cuda" and geometry.packed_record_bytes is not None
    if device == "cpu":
        reason = "a CUDA device decodes packed experts, and device is cpu"
    elif not geometry.has_bf16_experts:
        reason = f"only bf16 experts can be packed, and these are {geometry.expert_dtype}, or not that alone"
    elif geometry.packed_record_bytes is None:
        reason = f"experts of {geometry.record_bytes} bytes do not get smaller by it"
    else:
        return True
    raise ConfigError(f"memory.packed: true cannot be: {reason}; write memory.packed: auto")


def _memory(
    memory: MemoryConfig, hardware: Hardware, geometry: Geometry, *, demand: Demand
) -> ResolvedMemory:
    budgets = make_budgets(memory, hardware, demand.device)
    return ResolvedMemory(
        gpu=budgets.device,
        host=budgets.host,
        slabs=choose_slabs(memory, geometry, demand, budgets),
        pool=memory.pool,
        pinned_prefix=demand.pinned_prefix,
        backing=memory.backing,
        expert_file=memory.expert_file,
        host_slabs=choose_host_slabs(memory, geometry, demand, budgets),
        packed=demand.is_packed,
    )


def _threads(config: Config, hardware: Hardware) -> int:
    """`auto` is physical cores: two threads of one core share its vector units and gain nothing here."""
    threads, most = config.cpu.threads, hardware.usable_cores + 1
    if threads == "auto":
        return max(1, min(hardware.physical_cores, hardware.usable_cores))
    if threads > most:
        raise ConfigError(
            f"cpu.threads={threads} is too many for the {hardware.usable_cores} cores that this process may "
            f"use: one for the engine and one more a core, at most; write {most} or less, or auto"
        )
    return threads
