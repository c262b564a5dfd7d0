"""Captured steps that do without forecasts: who gives way in them, and what they hand back.

    prompt    what the host's policy says ──adopt──► tables ─ steps ─ steps ──give_back──► the host's policy

Where the policy follows forecasts, plain steps evict by recent use; what prompts and earlier steps left is
ranked by how much they used it, below all that is used from now on.
"""

from __future__ import annotations

from hetero_gpu.tables import DeviceTables
from hetero_scheduler import EvictionPolicy, SlotMachine
from hetero_scheduler.eviction.lookahead import Lookahead
from hetero_scheduler.eviction.lru import Lru


class PlainSteps:
    """Of a policy that knows history alone, forecasts or not: its scores go over as they are."""

    def adopt(self, tables: DeviceTables, machine: SlotMachine, eviction: EvictionPolicy) -> None:
        """As `tables.adopt`, before plain steps."""
        tables.adopt(machine, eviction)

    def give_back(self, tables: DeviceTables, machine: SlotMachine, eviction: EvictionPolicy) -> None:
        """As `tables.to_machine`, after them."""
        tables.to_machine(machine, eviction)


class RecentSteps(PlainSteps):
    """Of the lookahead policy."""

    def __init__(self, eviction: Lookahead) -> None:
        self._recent = Lru(*eviction.score.shape)

    def adopt(self, tables: DeviceTables, machine: SlotMachine, eviction: EvictionPolicy) -> None:
        assert isinstance(eviction, Lookahead), f"{eviction.name} keeps no shares"
        self._recent = eviction.recent()
        tables.adopt(machine, self._recent)

    def give_back(self, tables: DeviceTables, machine: SlotMachine, eviction: EvictionPolicy) -> None:
        assert isinstance(eviction, Lookahead), f"{eviction.name} keeps no shares"
        tables.to_machine(machine, self._recent)
        eviction.resume(self._recent)
