"""A cache of host slabs as something that shrinks and grows."""

from __future__ import annotations

from hetero_gpu import SlabCache, SlabPool
from hetero_runtime.config import ResolvedConfig
from hetero_runtime.plan.hardware import detect
from hetero_runtime.tiers.governor import Governor, Marks
from hetero_runtime.tiers.host_slabs import HostSlabs
from hetero_runtime.tiers.supply import Supply


class ElasticTier:
    """Slots of `cache` with the memory of `slabs`; every layer keeps `least` slots."""

    def __init__(self, cache: SlabCache, slabs: HostSlabs, *, least: int) -> None:
        self._cache, self._slabs, self._least = cache, slabs, least

    def shrink(self, num_slots: int) -> int:
        """See `governor.Tier`."""
        slots = self._cache.shrink(num_slots, least=self._least)
        for slot in slots:
            self._slabs.discard(slot)
        return len(slots)

    def grow(self, num_slots: int) -> int:
        """See `governor.Tier`."""
        return self._cache.grow(num_slots)


def make_governor(
    config: ResolvedConfig, supply: Supply, slabs: SlabPool, cache: SlabCache, *, top_k: int
) -> Governor | None:
    """The governor of the slabs of host memory that are read from a disk; None where there are none,
    where the system itself decides what stays in memory, and where slabs are locked for a GPU to read."""
    if config.memory.backing != "direct" or config.device == "unified":
        return None
    if supply.host is not None:
        slabs, cache = supply.host.slabs, supply.host.cache
    assert isinstance(slabs, HostSlabs), "what is read from a disk is read to host slabs"
    return Governor(
        ElasticTier(cache, slabs, least=top_k),
        num_slots=slabs.num_slabs,
        slot_bytes=slabs.record_bytes,
        marks=Marks.of(detect("cpu").ram_total_bytes),
    )
