"""What computes misses in place, from a resolved configuration."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hetero_cpu_kernels.experts import ExpertForm, Target, best_target, is_executable, target, targets_here
from hetero_cpu_kernels.ktransformers import KtPool, check_form, spare_cpus
from hetero_cpu_kernels.ktransformers import load as load_kt
from hetero_cpu_kernels.pool import place_workers
from hetero_gpu import SlabCache
from hetero_gpu.packed import PackedLayout
from hetero_gpu.stopwatch import Stopwatch, stopwatch_for
from hetero_runtime.config import ResolvedConfig
from hetero_runtime.doctor.cores import this_machine
from hetero_runtime.errors import ConfigError
from hetero_runtime.experts.base import ExpertStore
from hetero_runtime.experts.filling import make_filling
from hetero_runtime.experts.formats import WeightForm
from hetero_runtime.experts.kernel_format import UnreadableError, expert_format
from hetero_runtime.experts.packing import packing_of
from hetero_runtime.experts.quantize import make_quantizer
from hetero_runtime.experts.record import RecordLayout
from hetero_runtime.experts.sources import ExpertsModule, plan_experts
from hetero_runtime.experts.store import BankStore
from hetero_runtime.foresight.link import Link
from hetero_runtime.hf.hooks import expert_mlp
from hetero_runtime.in_place.base import InPlaceExperts
from hetero_runtime.in_place.calibration import Sample, measure_costs
from hetero_runtime.in_place.form import in_place_form
from hetero_runtime.in_place.ktransformers import KtExperts
from hetero_runtime.in_place.misses import InPlaceMisses, OnDevice
from hetero_runtime.in_place.torch_loop import TorchExperts
from hetero_runtime.plan.demand import prefetches_in_graph
from hetero_scheduler import EvictionPolicy, ExpertKey
from hetero_scheduler.misses import AllInPlace, ByCost, FixedShare, MissPolicy, Verdict

log = logging.getLogger(__name__)

_SPINS_IN_A_STEP = 60_000
"""Looks of a worker before it sleeps, some 3 ms: not every layer of a step calls."""


class Routed(NamedTuple):
    """The routed experts of a model: transformers' Experts modules, and the dtype of the computation."""

    modules: list[Any]
    dtype: torch.dtype

    @property
    def hidden(self) -> int:
        """H"""
        module = self.modules[0]
        return int(module.down_proj.shape[2 if module.is_transposed else 1])


def check_in_place(config: ResolvedConfig, routed: Routed, sources: Sequence[ExpertsModule]) -> None:
    """Raise ConfigError, before anything is read, where the CPU cannot compute these experts."""
    if config.misses.handler == "load":
        return
    if config.cpu.backend == "torch":
        if config.device != "cpu" and expert_mlp(routed.modules[0]).post_norm is not None:
            raise ConfigError(
                f"misses.handler: {config.misses.handler} cannot be: these experts have a norm of their own, "
                "which lies on the GPU; write misses.handler: load"
            )
        return
    cpus = _cpus(config)
    if config.cpu.backend == "native":
        _target(config)
    plan = plan_experts(sources[:1])  # all layers are alike
    table = make_filling(plan, make_quantizer(plan, config.model.experts), None).table
    if config.cpu.backend == "ktransformers":
        form = _form(config, routed, table.layout, table.forms, None)
        _check_kt(config, form, table.num_experts, cpus)
        return
    packing = packing_of(table.layout) if config.memory.packed else None
    _form(config, routed, table.layout, table.forms, packing)


def splits_by_cost(config: ResolvedConfig) -> bool:
    """Whether misses are split by what link and CPU were measured to take."""
    return config.misses.handler == "hybrid" and config.misses.cpu_share == "auto"


def make_in_place(
    config: ResolvedConfig,
    routed: Routed,
    store: ExpertStore,
    *,
    cache: SlabCache,
    eviction: EvictionPolicy,
    link: Link | None,
) -> InPlaceMisses | None:
    """What the orchestrator asks; None where misses are loaded. Compiles, and for a split by cost (which
    needs the `link`) measures: some seconds."""
    if config.misses.handler == "load":
        return None
    assert isinstance(store, BankStore), "experts below host memory cannot be computed where they lie"
    experts = make_in_place_experts(config, routed, store)
    try:
        policy = _policy(config, routed, store, experts=experts, link=link)
    except BaseException:
        experts.close()
        raise
    stopwatch: Stopwatch[OnDevice] = stopwatch_for(torch.device(config.torch_device))
    return InPlaceMisses(experts, policy, cache=cache, eviction=eviction, stopwatch=stopwatch)


def make_in_place_experts(config: ResolvedConfig, routed: Routed, store: BankStore) -> InPlaceExperts:
    """The backend that `cpu.backend` names."""
    if config.cpu.backend == "torch":
        return TorchExperts(
            [expert_mlp(module) for module in routed.modules],
            parameters=lambda key: store.materialize(store.plain_record(key), routed.dtype),
            dtype=routed.dtype,
            num_threads=_num_workers(config),
        )
    if config.cpu.backend == "ktransformers":
        return _make_kt(config, routed, store)
    return _make_native(config, routed, store)


def _make_native(config: ResolvedConfig, routed: Routed, store: BankStore) -> InPlaceExperts:
    from hetero_cpu_kernels.pool import WorkerPool  # these compile as they are imported
    from hetero_runtime.in_place.native import NativeExperts

    form, cpus = _form(config, routed, store.layout, store.forms, store.packing), _cpus(config)
    pool = WorkerPool(cpus, spins=_SPINS_IN_A_STEP) if config.execution.mode == "graph" else WorkerPool(cpus)
    try:
        return NativeExperts(
            form,
            pool,
            target=_target(config),
            records=store.records,
            num_experts=store.num_experts,
            spare_cpus=frozenset(core[0] for core in this_machine().cores) - frozenset(cpus),
        )
    except BaseException:
        pool.close()
        raise


def _make_kt(config: ResolvedConfig, routed: Routed, store: BankStore) -> InPlaceExperts:
    """From plain records: kt-kernel repacks them anyway."""
    form, cpus = _form(config, routed, store.layout, store.forms, None), _cpus(config)
    _check_kt(config, form, store.num_experts, cpus)

    def records(layer: int) -> npt.NDArray[np.uint8]:
        keys = [ExpertKey(layer, expert) for expert in range(store.num_experts)]
        if store.packing is not None:
            return np.stack([store.plain_record(key).numpy() for key in keys])
        first = store.table.row(keys[0])
        all_records: npt.NDArray[np.uint8] = store.records.numpy().reshape(-1, store.stored_bytes)
        return all_records[first : first + len(keys)]

    pool = KtPool(cpus)
    try:
        return KtExperts(form, pool, records=records, num_layers=store.num_layers)
    except BaseException:
        pool.close()
        raise


def _check_kt(config: ResolvedConfig, form: ExpertForm, num_experts: int, cpus: tuple[int, ...]) -> None:
    why = None
    if config.model.dtype != "bfloat16":
        why = f"it computes in bfloat16, and model.dtype is {config.model.dtype}"
    else:
        try:
            load_kt()
            check_form(form, num_experts)
            spare_cpus(cpus)
        except (ImportError, ValueError) as error:
            why = str(error)
    if why is not None:
        raise ConfigError(f"cpu.backend: ktransformers cannot be: {why}; or write cpu.backend: native")


def _policy(
    config: ResolvedConfig, routed: Routed, store: BankStore, *, experts: InPlaceExperts, link: Link | None
) -> MissPolicy:
    if config.misses.handler == "cpu":
        return AllInPlace()
    if config.misses.cpu_share != "auto":
        return FixedShare(config.misses.cpu_share)
    first = ExpertKey(0, 0)
    copy_s = None if link is None else link.copy_s(first)
    assert link is not None and copy_s is not None, "a split by cost needs the cost of the link"
    device = torch.device(config.torch_device)
    record = store.plain_record(first).to(device)
    sample = Sample(
        hidden=routed.hidden,
        num_layers=store.num_layers,
        num_experts=store.num_experts,
        dtype=routed.dtype,
        mlp=expert_mlp(routed.modules[0]),
        params=lambda: store.materialize(record, routed.dtype),
    )
    return ByCost(
        measure_costs(experts, sample, device, load_s=copy_s, overlaps=link.overlaps), on_lost=_say_lost
    )


def _say_lost(verdict: Verdict) -> None:
    log.warning(
        "misses are all loaded from now on: an expert takes %.2f ms on the CPU and %.2f ms over the link, so "
        "the CPU helped no layer; misses.handler: load saves its memory, and cpu.threads or cpu.isa may "
        "make it faster",
        1e3 * verdict.in_place_s,
        1e3 * verdict.load_s,
    )


def _form(
    config: ResolvedConfig,
    routed: Routed,
    layout: RecordLayout,
    forms: dict[str, WeightForm],
    packing: PackedLayout | None,
) -> ExpertForm:
    try:
        return in_place_form(expert_format(layout, forms, routed.modules[0]), packing)
    except UnreadableError as error:
        raise ConfigError(
            f"cpu.backend: {config.cpu.backend} cannot compute these experts: {error}; write "
            "cpu.backend: torch"
        ) from error


def _cpus(config: ResolvedConfig) -> tuple[int, ...]:
    """A processor for each worker."""
    try:
        return place_workers(this_machine(), _num_workers(config))
    except ValueError as error:
        raise ConfigError(
            f"cpu.threads: {config.cpu.threads} leaves {_num_workers(config)} that compute experts, "
            f"and {error}; write cpu.threads: auto"
        ) from error


def _num_workers(config: ResolvedConfig) -> int:
    """A captured step has a thread that spins to hear its calls, and one more where it prefetches: each needs
    a core, or a worker that shares one with it is milliseconds late."""
    if config.execution.mode != "graph":
        return config.cpu.workers
    return max(1, config.cpu.workers - 1 - prefetches_in_graph(config))


def _target(config: ResolvedConfig) -> Target:
    """The fastest instruction set, or the one asked for. What rounds is for models in bfloat16."""
    rounds = config.model.dtype == "bfloat16"
    if config.cpu.isa == "auto":
        return best_target(rounds=rounds)
    asked = target(config.cpu.isa)
    here = [entry.name for entry in targets_here() if rounds or entry.keeps_float32]
    if asked.name in here:
        return asked
    why = f"rounds what it multiplies, and model.dtype is {config.model.dtype}"
    if not is_executable(asked):
        why = "does not execute on this machine"
    raise ConfigError(f"cpu.isa: {asked.name} {why}; write cpu.isa: auto, or one of {', '.join(here)}")
