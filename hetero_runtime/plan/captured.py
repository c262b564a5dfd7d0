"""Whether a decode step can be captured as a CUDA graph, before anything is loaded: why not, in a sentence.

combinations   of keys that exclude each other                  config/combinations.py, config/unified.py
machine        without Triton, or with an old GPU               here
model          whose step needs the host                        here, from config.json
slabs          too few, or more than the tables serve           here
at the start   a bank that CUDA does not register, and such     graph.py: decoding stays eager, and says why
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hetero_gpu.limits import MOST_EXPERTS, MOST_PAIRS, MOST_SLOTS
from hetero_runtime.config.tree import Pool, ResolvedConfig, ResolvedMemory
from hetero_runtime.plan.demand import drafted_tokens, prefetches_in_graph
from hetero_runtime.plan.geometry import Geometry
from hetero_runtime.plan.hardware import Hardware

MOST_OUTSTANDING = 4
"""Prefetches of a captured step without a landing: one copy open, one landing and two to follow. Each holds a
slot, on which no layer may count."""
_CAPTURABLE_LAYERS = {"full_attention", "sliding_attention", "linear_attention"}


def why_not_captured(geometry: Geometry, config: ResolvedConfig, hardware: Hardware) -> str | None:
    """The reason why the step of `config`, resolved with `execution.mode: graph`, would not be captured; None
    where nothing speaks against it before it is tried."""
    num_drafted, memory = drafted_tokens(config), config.memory
    rows = num_drafted + 1 if num_drafted else config.execution.max_rows
    return (
        why_not_on(hardware)
        or why_model_needs_host(geometry.layer_kinds, geometry.rope_types)
        or (why_drafts_stay(geometry.layer_kinds) if num_drafted else None)
        or why_no_tables(geometry, memory, num_pairs=rows * geometry.top_k)
        or why_too_few_slabs(
            slabs_of_layers(memory, num_layers=geometry.num_moe_layers),
            memory.pool,
            num_experts=geometry.num_experts,
            rows=rows,
            top_k=geometry.top_k,
            spare=MOST_OUTSTANDING if prefetches_in_graph(config) else 0,
        )
    )


def why_not_on(hardware: Hardware) -> str | None:
    """The reason why this machine captures no step, or None."""
    if not hardware.has_triton:
        return "Triton is not installed, which compiles the kernels of a captured step"
    if hardware.gpu is not None and not hardware.gpu.has_bf16:
        return f"{hardware.gpu.name} has no bf16 in hardware (compute capability 8.0 has)"
    return None


def why_model_needs_host(layer_kinds: Collection[str], rope_types: Collection[str]) -> str | None:
    """The reason why a decode step of a model needs the host, or None. `layer_kinds`: of its attention,
    `rope_types`: of its rotary embedding, in transformers' words."""
    others = sorted(set(layer_kinds) - _CAPTURABLE_LAYERS)
    if others:
        return f"transformers keeps the cache of its {' and '.join(others)} layers on the host's side"
    if "dynamic" in rope_types:
        return "its rotary embedding (rope_type dynamic) compares the length on the host in every step"
    return None


def why_drafts_stay(layer_kinds: Collection[str]) -> str | None:
    """The reason why drafts of a model are not checked in captured steps, or None."""
    if "linear_attention" in layer_kinds:
        return "its layers of linear attention cannot forget the tokens of a draft"
    return None


def why_no_tables(geometry: Geometry, memory: ResolvedMemory, *, num_pairs: int) -> str | None:
    """The reason why the tables on the device are too small for a model, or None. `num_pairs`: tokens of a
    step times top-k."""
    num_slots = memory.slabs + memory.pinned_prefix * geometry.num_experts
    for name, value, most in (
        ("slots", num_slots, MOST_SLOTS),
        ("experts a layer", geometry.num_experts, MOST_EXPERTS),
        ("tokens times top-k", num_pairs, MOST_PAIRS),
    ):
        if value > most:
            return f"{value} {name}: the device tables serve 1 to {most}"
    return None


def slabs_of_layers(memory: ResolvedMemory, *, num_layers: int) -> list[int]:
    """Slabs that each MoE layer behind the pinned prefix may use; with a global pool the same ones."""
    rest = num_layers - memory.pinned_prefix
    if memory.pool == "global":
        return [memory.slabs] * rest
    return [memory.slabs // rest] * rest if rest else []


def why_too_few_slabs(
    sizes: Sequence[int], pool: Pool, *, num_experts: int, rows: int, top_k: int, spare: int
) -> str | None:
    """The reason why `rows` rows of a step cannot have all experts of a layer at once that they can need,
    beside `spare` prefetches; None where they can. `sizes`: as `slabs_of_layers` says, of `num_experts`."""
    wanted = min(rows * top_k, num_experts)
    most = num_experts * (len(sizes) if pool == "global" else 1)
    needed = min(wanted + spare, most)
    if not sizes or min(sizes) >= needed:
        return None
    beside = f" beside {spare} prefetches" if spare else ""
    total = needed * (1 if pool == "global" else len(sizes))
    return (
        f"a layer has {min(sizes)} slabs, and {rows} rows can need {wanted} experts of it at once{beside}; "
        f"set memory.slabs={total} or more, or fewer execution.max_rows"
    )
