"""How many bytes a plan may use on each tier."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from hetero_runtime.config.tree import Device, MemoryConfig
from hetero_runtime.plan.demand import PHASES, TIERS, Phase, Row, Tier
from hetero_runtime.plan.hardware import Hardware

NO_LIMIT = sys.maxsize
_RESERVE_SHARE = 0.05
_RESERVE_LEAST = 256 << 20
_RESERVE_MOST = 2 << 30


@dataclass(frozen=True)
class Shortage:
    """A tier that is too small in a phase, in bytes."""

    tier: Tier
    phase: Phase
    needed: int
    limit: int

    @property
    def missing(self) -> int:
        return self.needed - self.limit


@dataclass(frozen=True)
class Budgets:
    """Bytes allowed. With `is_shared` the device's bytes lie in host memory and count there as well."""

    device: int
    host: int
    is_shared: bool
    disk: int = NO_LIMIT
    """Free swap, for experts that may be swapped out. What lies in a file is there already."""

    def limit(self, tier: Tier) -> int:
        """Bytes allowed on `tier`."""
        return {"device": self.device, "host": self.host, "disk": self.disk}[tier]

    def counted(self, rows: Iterable[Row], tier: Tier) -> list[Row]:
        """Those of `rows` that count against `tier`."""
        counts_device = self.is_shared and tier == "host"
        return [row for row in rows if row.tier == tier or (counts_device and row.tier == "device")]

    def used(self, rows: Iterable[Row], tier: Tier, phase: Phase) -> int:
        """Bytes of `rows` that count against `tier` in `phase`."""
        return sum(row.at(phase) for row in self.counted(rows, tier))

    def shortages(self, rows: Sequence[Row]) -> list[Shortage]:
        """Where `rows` take more than is allowed; empty when they fit."""
        found = (
            Shortage(tier, phase, self.used(rows, tier, phase), self.limit(tier))
            for tier in TIERS
            for phase in PHASES
        )
        return [shortage for shortage in found if shortage.missing > 0]

    def room(self, rows: Sequence[Row]) -> int:
        """Bytes that are left in every phase for one more row on the device; negative: too many already."""
        tiers: tuple[Tier, ...] = ("device", "host") if self.is_shared else ("device",)
        return min(self.limit(tier) - self.used(rows, tier, phase) for tier in tiers for phase in PHASES)


def is_one_memory(device: Device, hardware: Hardware) -> bool:
    """Whether the device's bytes lie in host memory."""
    return device != "cuda" or (hardware.gpu is not None and hardware.gpu.is_integrated)


def make_budgets(memory: MemoryConfig, hardware: Hardware, device: Device) -> Budgets:
    """What `memory.gpu` and `memory.host` allow on this machine, never more than it has now.

    Where one memory is both, free memory is counted once, as the kernel counts it: what a GPU's driver calls
    free there leaves out what the page cache would give back. A GPU that plays unified memory holds the rest
    of the model, so its own memory limits it too.

    `auto` leaves a reserve of 5 % (0.25 to 2 GiB) for what no plan foresees: allocator fragmentation,
    library workspaces, the rest of the machine.
    """
    host = _allowed(memory.host, hardware.ram_available_bytes, hardware.ram_total_bytes)
    is_shared = is_one_memory(device, hardware)
    own = host
    if device != "cpu" and hardware.gpu is not None and not hardware.gpu.is_integrated:
        own = _allowed(memory.gpu, hardware.gpu.free_bytes, hardware.gpu.total_bytes)
    elif memory.gpu != "auto":
        own = memory.gpu
    return Budgets(min(own, host) if is_shared else own, host, is_shared)


def _allowed(setting: int | Literal["auto"], available: int, total: int) -> int:
    return auto_bytes(available, total) if setting == "auto" else min(setting, available)


def auto_bytes(available: int, total: int) -> int:
    """What `auto` allows where `available` of `total` bytes are free."""
    reserve = min(max(int(_RESERVE_SHARE * total), _RESERVE_LEAST), _RESERVE_MOST)
    return max(0, available - reserve)
