"""What a slab cache did, whether the host decided or the device (SeqMoE §9.3)."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_scheduler.counters import Counters


@dataclass
class CacheStats(Counters):
    """Counters since the cache was made. `required` counts (layer, expert) pairs that a pass had to execute;
    required = hits + late + misses, and prefetches = hits_prefetched + late + prefetches_wasted + those that
    nothing has required yet. What becomes of a prefetch is counted when it happens: between two moments more
    of them may settle than were made."""

    required: int = 0
    hits: int = 0
    """Resident before any on-demand load of the layer."""
    late: int = 0
    """Prefetched, but still on the link when the layer that requires it began."""
    misses: int = 0
    """Absent: loaded on demand, or computed where they lie."""
    loads: int = 0
    prefetches: int = 0
    prefetches_dropped: int = 0
    """Prefetches that had not arrived when their layer ran without them."""
    evictions: int = 0
    bytes_moved: int = 0
    hits_prefetched: int = 0
    """Of the hits: landed prefetches that nothing had required before."""
    prefetches_wasted: int = 0
    """Prefetched, and evicted or given up on the link before anything required them."""
    stalls: int = 0
    """Layers of a pass that began without all that they required: late, missing, or both."""

    @property
    def hit_rate(self) -> float:
        """Hits / required, 1.0 when nothing was required."""
        return self.hits / self.required if self.required else 1.0

    @property
    def prefetches_open(self) -> int:
        """Prefetches that nothing has required and that were not wasted either, or that are no longer
        followed since they changed hands between host and device. Of all counters since the start only."""
        return self.prefetches - self.hits_prefetched - self.late - self.prefetches_wasted
