"""Experts computed on the CPU where their records lie in the host bank, in place of a load.

base            the contract of a backend: work in, sum out
native          our kernels, packed records too         torch_loop      torch's own products
ktransformers   kt-kernel's, on a copy of its own
work            a part of a layer as work               misses          the part of a layer, start to sum
calibration     what experts cost on this machine       build           all of it, from a configuration
form            a record, described to the kernels
answers         calls of a captured step, answered
"""

from __future__ import annotations

from hetero_runtime.in_place.base import Done, InPlaceExperts, Work
from hetero_runtime.in_place.misses import InPlaceMisses, InPlaceStats

__all__ = ["Done", "InPlaceExperts", "InPlaceMisses", "InPlaceStats", "Work"]
