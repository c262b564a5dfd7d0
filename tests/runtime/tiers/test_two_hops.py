"""Records over two hops: a disk and a link that do as the test says."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest
import torch

from hetero_gpu import SlabCache, SlabPool
from hetero_runtime.errors import RequestError
from hetero_runtime.tiers import reading
from hetero_runtime.tiers.base import StoredRecord
from hetero_runtime.tiers.host_slabs import HostSlabs
from hetero_runtime.tiers.reading import ReadingCopier
from hetero_runtime.tiers.returning import ReturningRecords
from hetero_runtime.tiers.two_hops import TwoHopCopier
from hetero_scheduler import ExpertKey, Lookup, SlotMachine, make_eviction
from tests.gpu.fake_copier import FakeCopier
from tests.runtime.engine.rest import engine_threads
from tests.runtime.tiers.disks import NUM_EXPERTS, RECORD, FakeDisk, bytes_of

LAYERS, LINK_S = 2, 0.25


class Rig:
    """`num_device` slabs over `num_host` slabs over a disk; `num_returning` records may return at once."""

    def __init__(self, num_device: int, num_host: int, num_returning: int = 0) -> None:
        self.disk, self.link = FakeDisk(), FakeCopier()
        self.eviction = make_eviction("lru", num_layers=LAYERS, num_experts=NUM_EXPERTS)
        self.host_slabs = HostSlabs(num_host, RECORD)
        self.num_returning = num_returning
        buffers = torch.empty((num_returning, RECORD), dtype=torch.uint8)
        self.returning = ReturningRecords(self.disk, self.link, buffers) if num_returning else None
        self.reads = ReadingCopier(self.returning or self.disk, num_threads=2)
        self.host = self._cache(self.host_slabs, self.reads)
        self.copier = TwoHopCopier(
            self.host,
            eviction=self.eviction,
            reads=self.reads,
            link=self.link,
            link_s=LINK_S,
            returning=self.returning,
        )
        self.cache = self._cache(SlabPool(num_device, RECORD, torch.device("cpu")), self.copier)

    def _cache(self, slabs: SlabPool, copier: ReadingCopier | TwoHopCopier) -> SlabCache:
        return SlabCache(
            slabs=slabs,
            machine=SlotMachine(slabs.num_slabs, num_layers=LAYERS, num_experts=NUM_EXPERTS),
            eviction=self.eviction,
            copier=copier,
            record=self._record,
        )

    def _record(self, key: ExpertKey) -> StoredRecord:
        is_back = self.returning is not None and self.returning.has(key)
        return StoredRecord(key, 0 if is_back else RECORD)

    def execute(self, layer: int, *experts: int) -> None:
        keys = [ExpertKey(layer, expert) for expert in experts]
        tokens = torch.zeros(NUM_EXPERTS, dtype=torch.int64)
        tokens[list(experts)] = 1
        self.eviction.observe(layer, tokens.numpy())
        self.cache.begin_layer(layer, frozenset(keys))
        for key in keys:
            if self.cache.lookup(key) is Lookup.MISS:
                assert self.cache.load(key, protected=keys)
        for key in keys:
            self.cache.wait(key)
            assert self.cache.slab(key).unique().tolist() == [bytes_of(key)]
        self.cache.release(keys)

    def assert_at_rest(self) -> None:
        self.copier.synchronize()
        self.cache.check()
        self.host.check()
        assert self.host.counts().fetch == self.host.counts().compute == 0
        assert self.host.num_available(0) == self.host.pool_size(0)
        assert self.reads.stats().reads <= sum(self.disk.counts().values()), "what returns asks no disk"
        if self.returning is not None:
            assert len(self.returning._free) == self.num_returning, "a buffer is held by nobody"


@pytest.fixture
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(reading, "RETRY_PAUSES_S", (0.0,))
    rig = Rig(*request.param)
    yield rig
    rig.assert_at_rest()
    rig.cache.close()
    rig.host_slabs.close()
    assert engine_threads() == []


@pytest.mark.parametrize("rig", [(2, 4)], indirect=True, ids=["2 over 4"])
def test_what_lies_in_host_memory_is_not_read_again(rig: Rig) -> None:
    rig.execute(0, 0, 1)
    rig.execute(0, 2, 3)  # over 0 and 1 on the device, beside them in host memory
    rig.execute(0, 0, 1)
    assert rig.disk.counts() == dict.fromkeys([ExpertKey(0, e) for e in range(4)], 1)
    assert (rig.link.num_submitted, rig.copier.num_spared) == (6, 2)
    rig.execute(1, 5)  # over 2 or 3 of host memory: used longest ago
    rig.execute(0, 0, 1)
    assert sum(rig.disk.counts().values()) == 5


@pytest.mark.parametrize(
    "rig", [(4, 1), (4, 2), (3, 3)], indirect=True, ids=["4 over 1", "4 over 2", "3 over 3"]
)
def test_few_host_slabs_are_enough(rig: Rig) -> None:
    for layer in (0, 1, 0):
        rig.execute(layer, 1, 4, 6)


@pytest.mark.parametrize("rig", [(4, 4)], indirect=True, ids=["4 over 4"])
def test_a_prefetch_arrives_without_anybody_looking(rig: Rig) -> None:
    assert rig.cache.prefetch(ExpertKey(1, 3))
    deadline = time.monotonic() + 10
    while not rig.link.pending and time.monotonic() < deadline:
        time.sleep(0.001)  # the thread that reads puts the copy on the link
    rig.link.arrive_next()
    rig.execute(1, 3)
    assert rig.cache.stats().hits == 1


@pytest.mark.parametrize("rig", [(1, 4)], indirect=True, ids=["1 over 4"])
def test_a_prefetch_given_up_never_reaches_a_slab_of_another(rig: Rig) -> None:
    rig.disk.stop()
    assert rig.cache.prefetch(ExpertKey(1, 3))
    rig.disk.await_begun(1)
    rig.cache.begin_layer(1, frozenset())  # dropped: its slab is free
    rig.disk.go_on()
    rig.execute(1, 5)
    rig.copier.synchronize()
    assert rig.cache.slab(ExpertKey(1, 5)).unique().tolist() == [bytes_of(ExpertKey(1, 5))]
    assert rig.link.num_submitted == 1
    rig.execute(1, 3)
    assert rig.disk.counts()[ExpertKey(1, 3)] == 1  # it had stayed in host memory


@pytest.mark.parametrize("rig", [(2, 2)], indirect=True, ids=["2 over 2"])
def test_a_record_that_cannot_be_read_fails_the_layer_and_holds_no_slab(rig: Rig) -> None:
    rig.disk.faults[ExpertKey(0, 1)] = [OSError(5, "Input/output error")] * 2
    with pytest.raises(RequestError, match="expert 1 of MoE layer 0"):
        rig.execute(0, 0, 1)
    rig.cache.settle()
    rig.assert_at_rest()
    assert rig.host.lookup(ExpertKey(0, 1)) is Lookup.MISS
    rig.execute(0, 0, 1)


@pytest.mark.parametrize("rig", [(2, 2)], indirect=True, ids=["2 over 2"])
def test_a_link_that_fails_fails_the_layer(rig: Rig) -> None:
    rig.link.fail_next = RuntimeError("the link is down")
    with pytest.raises(RuntimeError, match="the link is down"):
        rig.execute(0, 0)
    rig.cache.settle()
    rig.execute(0, 0)


@pytest.mark.parametrize("rig", [(2, 4)], indirect=True, ids=["2 over 4"])
def test_the_time_of_a_copy_counts_the_hops_it_takes(rig: Rig) -> None:
    near, far = ExpertKey(0, 0), ExpertKey(0, 1)
    assert rig.copier.copy_s(far) is None
    rig.execute(0, 0)
    rig.copier.synchronize()
    assert rig.copier.copy_s(near) == LINK_S
    assert (rig.copier.copy_s(far) or 0) > LINK_S


@pytest.mark.parametrize("rig", [(2, 4)], indirect=True, ids=["2 over 4"])
def test_the_host_tier_shrinks_and_grows_under_the_device(rig: Rig) -> None:
    rig.execute(0, 0, 1)
    rig.execute(0, 2, 3)
    rig.copier.synchronize()
    for slot in rig.host.shrink(3, least=1):
        rig.host_slabs.discard(slot)
    rig.execute(0, 0, 1)
    rig.execute(1, 2, 3)
    assert rig.host.grow(9) == 3
    rig.execute(0, 2, 3)
    rig.host.check()


@pytest.mark.parametrize(
    ("rig", "num_read"), [((2, 4), 15), ((2, 4, 2), 5)], indirect=["rig"], ids=["one way", "there and back"]
)
def test_what_returns_is_not_kept_twice(rig: Rig, num_read: int) -> None:
    for expert in (0, 1, 2, 3, 4) * 3:  # more than host memory holds, less than both do
        rig.execute(0, expert)
        rig.copier.synchronize()
    assert sum(rig.disk.counts().values()) == num_read


@pytest.mark.parametrize("rig", [(3, 8, 2)], indirect=True, ids=["3 over 8"])
def test_host_memory_gives_away_first_what_the_device_has(rig: Rig) -> None:
    every = [*(ExpertKey(0, expert) for expert in range(8)), ExpertKey(1, 0), ExpertKey(1, 1)]
    for key in every:
        rig.execute(*key)
        rig.copier.synchronize()
    on_device = {key for key in every if rig.cache.lookup(key) is Lookup.HIT}
    in_host = {key for key in every if rig.host.lookup(key) is Lookup.HIT}
    assert on_device == set(every[-3:])
    assert in_host >= set(every[:-3])


@pytest.mark.parametrize("rig", [(2, 4, 1), (3, 8, 2), (4, 9, 2), (1, 12, 3)], indirect=True, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_whatever_goes_there_and_back_arrives_whole(rig: Rig, seed: int) -> None:
    draw, num_slabs = random.Random(seed), rig.cache.pool_size(0)
    for _ in range(60):
        key = ExpertKey(draw.randrange(LAYERS), draw.randrange(NUM_EXPERTS))
        if num_slabs > 2 and rig.cache.counts().fetch == 0 and rig.cache.lookup(key) is Lookup.MISS:
            rig.cache.prefetch(key)
        if draw.random() < 0.2:
            rig.copier.synchronize()
        rig.execute(draw.randrange(LAYERS), *draw.sample(range(NUM_EXPERTS), min(2, num_slabs)))
        rig.host.check()


@pytest.mark.parametrize("rig", [(2, 4, 1)], indirect=True, ids=["2 over 4"])
def test_what_finds_no_buffer_is_lost_and_read_again(rig: Rig) -> None:
    assert rig.returning is not None
    buffers = rig.returning._free
    (buffer,) = buffers
    buffers.clear()
    for expert in (0, 1, 2, 3, 4) * 2:
        rig.execute(0, expert)
    assert sum(rig.disk.counts().values()) > 5
    buffers.append(buffer)


@pytest.mark.parametrize("rig", [(2, 4, 1)], indirect=True, ids=["2 over 4"])
def test_a_device_that_gives_nothing_back_fails_the_layer(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("the device is gone")

    for expert in range(5):
        rig.execute(0, expert)
        rig.copier.synchronize()
    with monkeypatch.context() as broken_link:
        broken_link.setattr(rig.link, "bring_back", broken)
        with pytest.raises(RuntimeError, match="the device is gone"):
            rig.execute(0, 5)
    rig.cache.settle()
    rig.execute(0, 5)
