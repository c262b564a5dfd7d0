"""The slab cache on a CPU, with copies that arrive when they are told to."""

from __future__ import annotations

import pytest
import torch

from hetero_gpu import SlabCache, SlabPool
from hetero_scheduler import ExpertKey, Lookup, SlotMachine, make_eviction
from tests.gpu.fake_copier import FakeCopier

NUM_LAYERS, NUM_EXPERTS, RECORD = 2, 6, 64


class Rig:
    """A cache of `num_slots` over records whose bytes name their expert."""

    def __init__(self, num_slots: int) -> None:
        self.copier = FakeCopier()
        self.eviction = make_eviction("lru", num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS)
        self.cache = SlabCache(
            slabs=SlabPool(num_slots, RECORD, torch.device("cpu")),
            machine=SlotMachine(num_slots, num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS),
            eviction=self.eviction,
            copier=self.copier,
            record=lambda key: torch.full((RECORD,), key.layer * 16 + key.expert, dtype=torch.uint8),
        )

    def execute(self, *keys: ExpertKey) -> None:
        """One layer: begin, load what misses, wait, check the bytes, release."""
        self.cache.begin_layer(keys[0].layer, frozenset(keys))
        for key in keys:
            if self.cache.lookup(key) is Lookup.MISS:
                assert self.cache.load(key, protected=keys)
        for key in keys:
            self.cache.wait(key)
            assert self.cache.slab(key).tolist() == [key.layer * 16 + key.expert] * RECORD
        self.cache.release(keys)
        self.cache.check()


def keys(layer: int, *experts: int) -> list[ExpertKey]:
    return [ExpertKey(layer, expert) for expert in experts]


def test_hits_and_misses_are_counted_and_bytes_are_right() -> None:
    rig = Rig(4)
    rig.execute(*keys(0, 0, 1))
    rig.execute(*keys(0, 1, 2))
    stats = rig.cache.stats()
    assert (stats.required, stats.hits, stats.late, stats.misses) == (4, 1, 0, 3)
    assert stats.hit_rate == 0.25
    assert stats.bytes_moved == 3 * RECORD
    rig.execute(*keys(1, 0, 1))  # one slot is empty, one must be evicted
    assert rig.cache.stats().evictions == 1


def test_a_prefetch_that_arrived_is_a_hit() -> None:
    rig = Rig(4)
    assert rig.cache.prefetch(ExpertKey(1, 3))
    rig.copier.arrive_next()
    rig.execute(*keys(1, 3))
    stats = rig.cache.stats()
    assert (stats.hits, stats.late, stats.misses, stats.prefetches) == (1, 0, 0, 1)


def test_a_prefetch_on_its_way_is_late_and_waited_for() -> None:
    rig = Rig(4)
    rig.cache.prefetch(ExpertKey(1, 3))
    rig.execute(*keys(1, 3))
    assert rig.cache.stats().late == 1
    assert rig.copier.num_submitted == 1


def test_an_unwanted_prefetch_on_its_way_is_dropped_and_its_slot_reused() -> None:
    rig = Rig(1)
    rig.cache.prefetch(ExpertKey(1, 3))
    rig.execute(*keys(1, 5))  # its own copy is queued behind, so the slab ends up with 5
    assert rig.cache.stats().prefetches_dropped == 1
    assert rig.cache.lookup(ExpertKey(1, 3)) is Lookup.MISS


def test_prefetches_of_another_layer_are_protected() -> None:
    rig = Rig(2)
    rig.cache.prefetch(ExpertKey(1, 0))
    rig.cache.prefetch(ExpertKey(1, 1))
    rig.cache.begin_layer(0, frozenset(keys(0, 0)))
    assert not rig.cache.load(ExpertKey(0, 0))
    rig.cache.check()


def test_a_failing_copy_gives_the_slot_back_and_leaves_the_cache_usable() -> None:
    rig = Rig(1)
    rig.execute(*keys(0, 0))
    rig.copier.fail_next = OSError("the link is down")
    rig.cache.begin_layer(0, frozenset(keys(0, 1)))
    with pytest.raises(OSError, match="the link is down"):
        rig.cache.load(ExpertKey(0, 1))
    rig.cache.check()
    assert rig.cache.counts().empty == 1
    rig.execute(*keys(0, 1))


def test_settle_after_a_pass_that_was_given_up() -> None:
    rig = Rig(2)
    rig.cache.begin_layer(0, frozenset(keys(0, 0, 1)))
    rig.cache.load(ExpertKey(0, 0))
    rig.cache.load(ExpertKey(0, 1))
    rig.cache.settle()
    assert rig.cache.counts().used == 2
    rig.execute(*keys(0, 0, 1))  # the copies still in flight are waited for
    assert rig.cache.stats().hits == 2


def test_a_copy_starts_after_all_that_may_use_its_slab() -> None:
    rig = Rig(1)
    rig.execute(*keys(0, 0))  # after what was submitted before the cache was made; its release is fence 2
    rig.execute(*keys(0, 1))
    assert rig.copier.starts_after == [1, 2]
    rig.cache.lend(lambda machine, eviction: None)
    rig.execute(*keys(0, 2))
    assert rig.copier.starts_after[2:] == [4]


def test_pinned_experts_stay() -> None:
    rig = Rig(2)
    rig.cache.pin(ExpertKey(0, 0))
    for expert in range(1, 5):
        rig.execute(*keys(1, expert))
    assert rig.cache.lookup(ExpertKey(0, 0)) is Lookup.HIT


def test_lending_waits_for_copies_and_leaves_everything_evictable() -> None:
    rig = Rig(3)
    rig.cache.prefetch(ExpertKey(1, 4))
    rig.cache.load(ExpertKey(0, 0))
    lent: list[object] = []
    rig.cache.lend(lambda machine, eviction: lent.extend((machine.counts(), eviction)))
    assert lent == [(1, 0, 0, 2), rig.eviction]
    assert not rig.copier.pending
    rig.execute(*keys(1, 4))
    assert rig.cache.stats().hits == 1
