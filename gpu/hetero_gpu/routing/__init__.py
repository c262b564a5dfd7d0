"""Routing policies on the device: the step of `hetero_scheduler.routing` for a token a row, without the host.

`DeviceCaches` holds the logical caches of all rows; `decide` is Algorithm 1's two parts over it (PSR §4.1) in
one launch: which experts a layer executes, and what the pre-gate inserts for the layer after it; `follow`,
which it calls, is the eviction score that keeps slabs in step with them. Decisions are the host's, bit for
bit, so a text may change sides between two tokens.
"""

from __future__ import annotations

from hetero_gpu.routing.caches import DeviceCaches
from hetero_gpu.routing.decide import Decided, Following, Said, decide
from hetero_gpu.routing.follow import follow

__all__ = ["Decided", "DeviceCaches", "Following", "Said", "decide", "follow"]
