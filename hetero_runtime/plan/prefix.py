"""How many first MoE layers stay on the device whole: VisMMOE's Eq. 10.

    I_valid = { L : L_semantic <= L <= (M_avail - C_safe) / S_layer }

M_avail: experts that the device has room for, prefix and slabs together. S_layer: experts of a layer.
C_safe: what the slabs must hold, the experts of the layer that runs and of the W that are looked ahead to.
L_semantic: layers whose routing says enough of what comes, as the predictor's calibration has found.

Inside the interval a profile of this model on this device says where it runs fastest; without one the least
is taken, since every layer of prefix takes slabs from all others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hetero_runtime.config.tree import MemoryConfig, Pool
from hetero_runtime.plan.budget import Budgets
from hetero_runtime.plan.demand import Demand
from hetero_runtime.plan.geometry import Geometry
from hetero_runtime.plan.slabs import fit_slabs, least_slabs, most_slabs
from hetero_scheduler.prefetch.top_b import WINDOW


@dataclass(frozen=True)
class ProfiledPrefix:
    """The fastest prefix that was measured where `num_experts` fit on the device."""

    num_experts: int
    pinned: int


def valid_prefixes(geometry: Geometry, num_experts: int, *, semantic_depth: int, pool: Pool) -> range:
    """I_valid, where the device has room for `num_experts`; may be empty. A prefix is never all layers."""
    safe = (WINDOW + 1) * geometry.top_k
    deepest = min(geometry.num_moe_layers - 1, max(0, num_experts - safe) // geometry.num_experts)
    while deepest and num_experts - deepest * geometry.num_experts < least_slabs(geometry, pool, deepest):
        deepest -= 1
    return range(semantic_depth, deepest + 1)


def choose_prefix(valid: range, num_experts: int, profiled: tuple[ProfiledPrefix, ...]) -> int:
    """The profiled prefix of the nearest room, or the valid one nearest to it; without a profile the least
    valid one. 0 where none is valid."""
    if not valid:
        return 0
    if not profiled:
        return valid.start
    nearest = min(profiled, key=lambda each: (abs(each.num_experts - num_experts), each.num_experts))
    return min(max(nearest.pinned, valid.start), valid.stop - 1)


def with_prefix(
    memory: MemoryConfig, geometry: Geometry, demand: Demand, budgets: Budgets
) -> tuple[MemoryConfig, int]:
    """`memory.pinned_prefix: auto` decided: the same settings for what is left to the slabs, and the prefix.

    A prefix comes out of what `memory.slabs` or `memory.residency` gives, so that these say how much of the
    experts is resident, whoever holds it. `demand`: with no prefix yet.
    """
    room = _room(memory, geometry, demand, budgets)
    lookahead = geometry.lookahead
    depth = 1 if lookahead is None else lookahead.semantic_depth
    profiled = () if lookahead is None else lookahead.profiled
    pinned = choose_prefix(
        valid_prefixes(geometry, room, semantic_depth=depth, pool=memory.pool), room, profiled
    )
    if not pinned or memory.slabs == "all" or (memory.slabs == "auto" and memory.residency is None):
        return memory, pinned
    slabs = min(room - pinned * geometry.num_experts, most_slabs(geometry, pinned))
    if memory.pool == "per_layer" and pinned < geometry.num_moe_layers:
        slabs -= slabs % (geometry.num_moe_layers - pinned)
    return replace(memory, slabs=slabs, residency=None), pinned


def _room(memory: MemoryConfig, geometry: Geometry, demand: Demand, budgets: Budgets) -> int:
    """M_avail, in experts."""
    if memory.residency is not None:
        return math.floor(memory.residency * geometry.num_routed_experts + 1e-6)
    if memory.slabs == "all":
        return geometry.num_routed_experts
    return fit_slabs(geometry, demand, budgets, "global") if memory.slabs == "auto" else memory.slabs
