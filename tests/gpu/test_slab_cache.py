"""The slab cache on a CPU, with copies that arrive when they are told to."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hetero_gpu import SlabCache, SlabPool, Transfer
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


def test_a_prefetch_that_is_kept_goes_on_and_keeps_its_slot() -> None:
    rig = Rig(2)
    kept = ExpertKey(1, 3)
    rig.cache.prefetch(kept)
    rig.cache.begin_layer(1, frozenset(keys(1, 5)), kept=[kept])
    assert rig.cache.lookup(kept) is Lookup.PENDING
    assert rig.cache.load(ExpertKey(1, 5))
    rig.cache.wait(ExpertKey(1, 5))  # copies arrive in order, so the one before has too
    rig.cache.release(keys(1, 5))
    rig.execute(kept)
    stats = rig.cache.stats()
    assert (stats.hits, stats.misses, stats.prefetches_dropped) == (1, 1, 0)


def test_prefetches_are_followed_to_their_first_use_or_their_end() -> None:
    rig = Rig(3)
    for key in keys(1, 0, 1, 2):
        rig.cache.prefetch(key)
    rig.copier.arrive_next()
    rig.copier.arrive_next()
    rig.execute(*keys(1, 0))  # 1 has landed unused, 2 is given up on the link
    stats = rig.cache.stats()
    assert (stats.hits, stats.hits_prefetched, stats.prefetches_wasted) == (1, 1, 1)
    assert stats.prefetches_dropped == 1
    rig.execute(*keys(1, 0))  # a resident is no prefetch any more
    assert rig.cache.stats().hits_prefetched == 1
    rig.execute(*keys(0, 3, 4, 5))
    assert rig.cache.stats().prefetches_wasted == 2


def test_what_is_present_and_what_will_be_available() -> None:
    rig = Rig(4)
    running = keys(0, 0, 1)
    rig.cache.begin_layer(0, frozenset(running))
    rig.cache.load(running[0])
    rig.cache.load(running[1])
    rig.cache.prefetch(ExpertKey(1, 5))
    assert rig.cache.present().nonzero()[1].tolist() == [0, 1, 5]
    assert rig.cache.num_available(1) == 1
    assert rig.cache.num_available_after(1, running) == 3
    assert rig.cache.num_available_after(1, keys(0, 4)) == 1  # not here at all


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


def test_a_copy_that_fails_has_cost_the_expert_in_its_place() -> None:
    rig = Rig(1)
    assert rig.cache.prefetch(ExpertKey(1, 0))
    rig.copier.arrive_next()
    rig.cache.begin_layer(1, frozenset())  # landed, and not required
    rig.copier.fail_next = OSError("the link is down")
    with pytest.raises(OSError, match="the link is down"):
        rig.cache.load(ExpertKey(0, 2))
    rig.cache.check()
    stats = rig.cache.stats()
    assert (stats.evictions, stats.prefetches_wasted, stats.prefetches_open) == (1, 1, 0)


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


def test_one_wait_for_many_is_for_the_last_that_was_submitted() -> None:
    rig = Rig(4)
    awaited = keys(1, 3, 0, 2)
    assert rig.cache.prefetch(awaited[1])
    for key in (awaited[2], awaited[0]):
        assert rig.cache.load(key)
    assert rig.cache.by_arrival(awaited) == [awaited[1], awaited[2], awaited[0]]
    assert rig.cache.load(ExpertKey(0, 5))
    rig.cache.wait_all(awaited)
    assert len(rig.copier.pending) == 1
    assert [rig.cache.slab(key)[0].item() for key in awaited] == [19, 16, 18]
    assert all(rig.cache.lookup(key) is Lookup.HIT for key in awaited)
    rig.cache.check()


def test_prefetches_on_the_way_are_those_that_have_not_arrived() -> None:
    rig = Rig(4)
    for key in keys(1, 0, 1, 2):
        assert rig.cache.prefetch(key)
    assert rig.cache.num_on_the_way() == 3
    rig.copier.arrive_next()
    assert rig.cache.num_on_the_way() == 2


def test_a_score_of_the_callers_own_says_who_gives_way() -> None:
    rig = Rig(2)
    rig.execute(*keys(0, 0, 1))
    score = np.full((NUM_LAYERS, NUM_EXPERTS), np.inf)
    assert not rig.cache.load(ExpertKey(1, 0), score=score)
    score[0, 1] = 7.0
    assert rig.cache.prefetch(ExpertKey(1, 0), score=score)
    assert rig.cache.lookup(ExpertKey(0, 1)) is Lookup.MISS
    assert rig.cache.residents(0).tolist() == [0]
    rig.cache.check()


def test_a_pass_given_up_keeps_no_slot_for_prefetches() -> None:
    rig = Rig(3)
    for key in keys(1, 0, 1):
        assert rig.cache.prefetch(key)
    assert rig.cache.load(ExpertKey(0, 0))
    rig.copier.arrive_next()
    rig.cache.settle()
    assert rig.cache.counts() == (1, 0, 0, 2)
    rig.cache.check()


# ---- copies that fail, pools that shrink


class _FailedTransfer(Transfer):
    """Its bytes never come."""

    is_given_up = False

    def is_done(self) -> bool:
        return False

    def is_over(self) -> bool:
        return True

    def wait(self) -> None:
        raise OSError("the disk is broken")

    def give_up(self) -> None:
        self.is_given_up = True


def fail_copies(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> _FailedTransfer:
    failed = _FailedTransfer()
    monkeypatch.setattr(rig.copier, "submit", lambda *_, **__: failed)
    return failed


def test_a_copy_that_fails_later_gives_the_slot_back_when_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(2)
    rig.execute(*keys(0, 3))
    failed = fail_copies(rig, monkeypatch)
    rig.cache.begin_layer(0, frozenset(keys(0, 0)))
    assert rig.cache.load(ExpertKey(0, 0))
    with pytest.raises(OSError, match="the disk is broken"):
        rig.cache.wait(ExpertKey(0, 0))
    assert failed.is_given_up
    assert rig.cache.lookup(ExpertKey(0, 0)) is Lookup.MISS
    rig.cache.check()
    monkeypatch.undo()
    rig.execute(*keys(0, 0))


def test_a_failed_copy_of_a_pass_given_up_is_loaded_anew_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(2)
    fail_copies(rig, monkeypatch)
    rig.cache.begin_layer(0, frozenset(keys(0, 0)))
    assert rig.cache.load(ExpertKey(0, 0))
    rig.cache.settle()
    monkeypatch.undo()
    rig.execute(*keys(0, 0))
    assert (rig.cache.stats().misses, rig.cache.stats().hits) == (2, 0)
    assert rig.cache.counts().empty == 1


def test_a_prefetch_that_failed_is_loaded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(2)
    fail_copies(rig, monkeypatch)
    assert rig.cache.prefetch(ExpertKey(1, 0))
    monkeypatch.undo()
    rig.execute(*keys(1, 0))
    stats = rig.cache.stats()
    assert (stats.prefetches_dropped, stats.misses, stats.late) == (1, 1, 0)


def test_a_pool_shrinks_by_empty_slots_then_by_the_policys_word_and_grows_again() -> None:
    rig = Rig(5)
    for expert in range(3):
        rig.eviction.observe(0, np.eye(NUM_EXPERTS, dtype=np.int64)[expert])
        rig.execute(*keys(0, expert))
    assert rig.cache.shrink(2, least=1) == [3, 4]
    assert rig.cache.shrink(1, least=1) == [0]  # used longest ago
    assert rig.cache.lookup(ExpertKey(0, 0)) is Lookup.MISS
    assert rig.cache.shrink(9, least=1) == [1]
    assert rig.cache.num_available(0) == 1
    rig.cache.check()
    rig.execute(*keys(0, 4))
    rig.execute(*keys(0, 5))  # one slot is enough
    assert rig.cache.grow(2) == 2
    assert rig.cache.num_available(0) == 3
    rig.execute(*keys(0, 0, 1, 2))
    assert rig.cache.grow(9) == 2
    assert sum(rig.cache.counts()) == 5


def test_a_shrinking_pool_keeps_what_is_held() -> None:
    rig = Rig(3)
    rig.cache.pin(ExpertKey(0, 0))
    rig.cache.prefetch(ExpertKey(1, 1))
    rig.cache.begin_layer(0, frozenset(keys(0, 2)))
    rig.cache.load(ExpertKey(0, 2))
    assert rig.cache.shrink(3, least=0) == []
    rig.cache.settle()
    assert len(rig.cache.shrink(3, least=0)) == 2
    assert rig.cache.lookup(ExpertKey(0, 0)) is Lookup.HIT
    rig.cache.check()


def test_a_copy_that_was_given_up_leaves_its_fence_to_the_next() -> None:
    rig = Rig(1)
    rig.execute(*keys(0, 0))  # the device may still read the slab: fence 2, after the one of the start
    assert rig.cache.prefetch(ExpertKey(1, 0))
    rig.cache.begin_layer(1, frozenset(keys(1, 1)))  # the prefetch is dropped on its way
    assert rig.cache.load(ExpertKey(1, 1))
    assert rig.copier.starts_after == [1, 2, 2]
    rig.cache.check()
