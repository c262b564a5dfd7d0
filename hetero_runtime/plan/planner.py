"""The plan: every row, every phase, against what there is. What cannot fit is refused here."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_runtime.config.tree import ResolvedConfig
from hetero_runtime.errors import BudgetError
from hetero_runtime.plan.budget import NO_LIMIT, Budgets, is_one_memory
from hetero_runtime.plan.demand import Demand, Phase, Row, Tier, fixed_rows, stored_record_bytes
from hetero_runtime.plan.geometry import Geometry
from hetero_runtime.plan.hardware import Hardware
from hetero_runtime.plan.refusal import explain
from hetero_runtime.plan.slabs import slab_row


@dataclass(frozen=True)
class MemoryPlan:
    """What goes where for one model, one configuration and one machine."""

    geometry: Geometry
    config: ResolvedConfig
    hardware: Hardware
    rows: tuple[Row, ...]
    budgets: Budgets
    why_eager: str | None = None
    """Why `execution.mode: auto` is eager on a GPU; None where it is not, or where that stands by name."""

    def used_bytes(self, tier: Tier, phase: Phase) -> int:
        """Bytes on `tier` in `phase`. On device cpu the host's include the device's."""
        return self.budgets.used(self.rows, tier, phase)

    @property
    def bank_bytes(self) -> int:
        """Bytes of all routed experts where they live, once they are loaded."""
        record = stored_record_bytes(self.geometry, is_packed=self.config.memory.packed)
        return self.geometry.num_routed_experts * record

    @property
    def residency(self) -> float:
        """Slabs as a share of all routed experts."""
        return self.config.memory.slabs / self.geometry.num_routed_experts


def make_plan(geometry: Geometry, config: ResolvedConfig, hardware: Hardware) -> MemoryPlan:
    """Lay out memory for `config`, as `resolve` returned it for this geometry and hardware.

    Pure, and allocates nothing. Raises BudgetError with the numbers and the smallest change that fits.
    """
    is_swapped = config.memory.backing == "swap"
    budgets = Budgets(
        config.memory.gpu,
        config.memory.host,
        is_shared=is_one_memory(config.device, hardware),
        disk=hardware.swap_free_bytes if is_swapped else NO_LIMIT,
    )
    rows = (
        *fixed_rows(geometry, Demand.of(config)),
        slab_row(geometry, config.memory.slabs, are_bank=config.slabs_are_bank),
    )
    if budgets.shortages(rows):
        raise BudgetError(explain(geometry, config, hardware, budgets=budgets, rows=rows))
    return MemoryPlan(geometry, config, hardware, rows, budgets)
