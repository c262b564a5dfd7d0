"""Pure decisions: which expert holds which slot, which one leaves, what is fetched next.

Nothing here knows a device or does I/O, so every decision can be replayed offline by the code that serves.
"""

from __future__ import annotations

from hetero_scheduler.eviction import EVICTION_POLICIES, EvictionPolicy, make_eviction
from hetero_scheduler.keys import ExpertKey
from hetero_scheduler.popularity import Popularity
from hetero_scheduler.slots import Lookup, Reservation, SlotCounts, SlotMachine, SlotState, SlotTable

__all__ = [
    "EVICTION_POLICIES",
    "EvictionPolicy",
    "ExpertKey",
    "Lookup",
    "Popularity",
    "Reservation",
    "SlotCounts",
    "SlotMachine",
    "SlotState",
    "SlotTable",
    "make_eviction",
]
