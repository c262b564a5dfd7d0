"""Routing policies on the device: the step of `hetero_scheduler.routing` for a token a row, without the host.

`DeviceCaches` holds the logical caches of all rows; `steer` and `select` are Algorithm 1's two parts over it
(PSR §4.1), one thread block a row. Decisions are the host's, bit for bit, so a text may change sides between
two tokens.
"""

from __future__ import annotations

from hetero_gpu.routing.caches import DeviceCaches
from hetero_gpu.routing.select import select
from hetero_gpu.routing.steer import steer

__all__ = ["DeviceCaches", "select", "steer"]
