"""What forecasts on the device lead to, inside the captured step: whom to evict, what to fetch.

refined      forecasts of the running step, made anew as more is known of it
candidates   the likeliest experts of each layer's next run
jsd          which of them the link carries next ─► task ring
expired      forecasts within the step ─► eviction scores (VisMMOE's lookahead priority)
"""

from __future__ import annotations

from hetero_gpu.foresight.candidates import Candidates
from hetero_gpu.foresight.expired import ExpiredFirst
from hetero_gpu.foresight.jsd import JsdPrefetch, Room
from hetero_gpu.foresight.refined import RefinedForecasts

__all__ = ["Candidates", "ExpiredFirst", "JsdPrefetch", "RefinedForecasts", "Room"]
