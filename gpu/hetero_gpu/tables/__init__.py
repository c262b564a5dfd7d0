"""The slab cache on the device, for a decode step captured as one CUDA graph.

tables.adopt(machine, eviction)          prefill's state comes over; outside the graph
── captured, for each layer ──
slots = ensure(tables, l, top_k_index)   hits, evictions, miss list
gather(tables, l, bank=, slabs=)         misses cross the link
experts read slab `slots[t, k]`
──
tables.to_machine(machine, eviction)     and back
"""

from __future__ import annotations

from hetero_gpu.control.fault import TableError
from hetero_gpu.tables.divide import TURNS, Dividing, Division
from hetero_gpu.tables.ensure import ensure
from hetero_gpu.tables.gather import MappedBank, gather, gather_reference
from hetero_gpu.tables.landing import Landings, await_late, land
from hetero_gpu.tables.prefetch import Wanted, create_prefetch
from hetero_gpu.tables.state import DeviceTables
from hetero_gpu.tables.unpack import unpack_landed
from hetero_gpu.tables.windows import Running, Windows

__all__ = [
    "TURNS",
    "DeviceTables",
    "Dividing",
    "Division",
    "Landings",
    "MappedBank",
    "Running",
    "TableError",
    "Wanted",
    "Windows",
    "await_late",
    "create_prefetch",
    "ensure",
    "gather",
    "gather_reference",
    "land",
    "unpack_landed",
]
