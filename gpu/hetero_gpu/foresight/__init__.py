"""What forecasts on the device lead to, inside the captured step: whom to evict, what to fetch.

windows   forecasts as they are used up ─► eviction scores (probabilistic Belady)
"""

from __future__ import annotations

from hetero_gpu.foresight.windows import Windows

__all__ = ["Windows"]
