"""Prefetch on the device against the host's machine: with the test as the worker, then with the worker."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
import torch

from hetero_gpu import SlabPool
from hetero_gpu.control import ControlRegion, Landed, PrefetchWorker, Word
from hetero_gpu.control.region import NUM_HEAD_WORDS
from hetero_gpu.packed import PackedLayout
from hetero_gpu.packed.reference import pack_reference
from hetero_gpu.tables import (
    DeviceTables,
    Landings,
    MappedBank,
    Wanted,
    await_late,
    create_prefetch,
    ensure,
    gather,
    land,
    unpack_landed,
)
from hetero_scheduler import SlotState
from tests.gpu.control.fake_link import FakeLink, RealLink
from tests.gpu.packed.records import as_bytes, weights
from tests.gpu.tables.host_twin import HostTwin
from tests.gpu.tables.test_ensure import assert_same, routing, run_layer

NUM_LAYERS, NUM_EXPERTS, RING, RECORD_BYTES = 3, 5, 4, 64
NUM_KEYS = NUM_LAYERS * NUM_EXPERTS


class Setting:
    """Tables, their twin, and a region between the tables and whoever plays the worker."""

    def __init__(
        self,
        device: torch.device,
        num_slots: int,
        policy: str = "lru",
        *,
        num_layers: int = NUM_LAYERS,
        layer_slots: list[int] | None = None,
    ) -> None:
        self.device = device
        self.twin = HostTwin.of(num_slots, num_layers, NUM_EXPERTS, policy=policy, layer_slots=layer_slots)
        self.tables = DeviceTables.from_machine(
            self.twin.machine, self.twin.eviction, max_pairs=8, device=device
        )
        self.region = ControlRegion(device, ring_size=RING)
        self.tables.attach(self.region)
        self.landings = Landings(self.region, RECORD_BYTES)
        self.words = self.region._view
        self.kept_back = 0
        self.num_taken = 0

    def prefetch(self, layer: int, keys: list[int]) -> None:
        wanted = torch.tensor(keys, dtype=torch.int32, device=self.device)
        create_prefetch(self.tables, layer, wanted, region=self.region, kept_back=self.kept_back)
        self.sync()

    def land(self) -> None:
        land(self.tables, self.landings)
        self.sync()

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    @property
    def num_outstanding(self) -> int:
        return int(self.tables.num_emitted.item() - self.tables.num_landed.item())

    def take(self) -> list[tuple[int, ...]]:
        """Tasks not taken yet: (key, slot, tag, deadline)."""
        tail = self.region.read(Word.TASK_TAIL)
        taken = [
            tuple(self.words[NUM_HEAD_WORDS + 4 * (i % RING) :][:4].tolist())
            for i in range(self.num_taken, tail)
        ]
        self.num_taken = tail
        return taken

    def report(self, slot: int, tag: int, status: Landed, *, buffer: int = 0, positions: int = 0) -> None:
        tail = self.region.read(Word.LANDING_TAIL)
        entry = self.words[NUM_HEAD_WORDS + 4 * RING + 5 * (tail % RING) :]
        entry[:5] = slot, tag, status, buffer, positions
        self.region.write(Word.LANDING_TAIL, tail + 1)


@pytest.mark.parametrize("policy", ["lru", "lfu", "lfru"])
@pytest.mark.parametrize(("num_slots", "kept_back"), [(3, 0), (6, 0), (6, 2), (11, 0), (11, 5)])
def test_random_prefetches_equal_the_machine(
    device: torch.device, num_slots: int, kept_back: int, policy: str
) -> None:
    """Tasks are served in any order, late, or not at all; a full ring holds back, never overruns. Every
    other layer lands in `ensure`."""
    setting = Setting(device, num_slots, policy)
    setting.kept_back = kept_back
    tables, twin = setting.tables, setting.twin
    rng = np.random.default_rng(num_slots)
    waiting: list[tuple[int, ...]] = []
    for step in range(24):
        layer = step % NUM_LAYERS
        for _ in range(rng.integers(0, len(waiting) + 1)):
            _, slot, tag, _ = waiting.pop(rng.integers(0, len(waiting)))
            status = Landed(int(rng.integers(0, 2)))
            setting.report(slot, tag, status)
            twin.land(slot, tag, has_arrived=status is Landed.ARRIVED)
        tells = setting.num_outstanding > 0
        landings = setting.landings if step % 2 else None
        if landings is None:
            setting.land()
            assert_same(tables, twin)
        run_layer(tables, twin, layer, routing(rng, NUM_EXPERTS, (1, 2)), landings=landings)
        assert not tells or setting.region.read(Word.POSITION) == step + 1
        keys = rng.integers(-1, NUM_KEYS, size=4).tolist()
        made = twin.prefetch(keys, RING - setting.num_outstanding, kept_back=kept_back)
        setting.prefetch(layer, keys)
        assert_same(tables, twin)
        tasks = setting.take()
        assert not tasks or setting.region.read(Word.POSITION) == step + 1, "from where they count"
        flat = [(r.key.layer * NUM_EXPERTS + r.key.expert, r.slot, r.tag) for r in made]
        assert [task[:3] for task in tasks] == flat
        ahead = [(r.key.layer - layer - 1) % NUM_LAYERS + 1 for r in made]
        assert [task[3] - (step + 1) for task in tasks] == ahead
        waiting += tasks
        assert len(waiting) == setting.num_outstanding <= RING
    stats = tables.stats()
    assert stats.prefetches == tables.num_emitted.item()
    assert stats.prefetches_dropped <= stats.prefetches
    of_link = {"loads", "bytes_moved", "prefetches_dropped"}
    decided = {name: value for name, value in asdict(stats).items() if name not in of_link}
    assert decided == {name: value for name, value in asdict(twin.stats).items() if name not in of_link}
    assert stats.required == stats.hits + stats.late + stats.misses
    assert stats.prefetches_open == tables.is_unproven.sum().item() == len(twin.unproven)


def test_a_full_ring_holds_back_and_goes_on_after_a_landing(device: torch.device) -> None:
    setting = Setting(device, num_slots=8)
    ensure(setting.tables, 0, torch.tensor([[0]], device=device))
    setting.prefetch(0, [5, 6, 7, 8, 9, 10])
    first, *_ = setting.take()
    assert setting.num_outstanding == RING
    setting.prefetch(0, [9])
    assert setting.take() == []
    setting.report(first[1], first[2], Landed.ARRIVED)
    setting.land()
    setting.prefetch(0, [9, 10])
    assert [task[0] for task in setting.take()] == [9]
    setting.tables.check()


@pytest.mark.parametrize("kept_back", [0, 2])
def test_prefetches_that_come_too_late_starve_no_layer(device: torch.device, kept_back: int) -> None:
    """A late one waits a whole pass for its layer; then the link hangs, with as many under way as may be."""
    setting, rng, worker = Setting(device, num_slots=6), np.random.default_rng(6), np.random.default_rng(2)
    setting.kept_back = kept_back
    waiting: list[tuple[int, ...]] = []
    copying: list[tuple[int, ...]] = []
    is_starved = False
    for step in range(24):
        layer = step % NUM_LAYERS
        setting.land()
        ahead = (layer + 1) % NUM_LAYERS * NUM_EXPERTS
        wanted = (ahead + rng.permutation(NUM_EXPERTS)[:2]).tolist()
        top_k = torch.from_numpy(routing(rng, NUM_EXPERTS, (1, 2))).to(device)
        is_starved |= bool((ensure(setting.tables, layer, top_k) < 0).any())
        setting.prefetch(layer, wanted)
        waiting += setting.take()
        for _ in range(worker.integers(0, 4)):
            if worker.integers(0, 2) == 0 and waiting and len(copying) < 2:
                task = waiting.pop(0)
                if step + 1 < task[3]:
                    copying.append(task)
                else:
                    setting.report(task[1], task[2], Landed.DROPPED)
            elif copying and step < 8:
                task = copying.pop(0)
                setting.report(task[1], task[2], Landed.ARRIVED)
    assert is_starved == (kept_back == 0)


def test_a_stale_tag_changes_nothing(device: torch.device) -> None:
    setting = Setting(device, num_slots=4)
    ensure(setting.tables, 0, torch.tensor([[0]], device=device))
    setting.prefetch(0, [6])
    _, slot, tag, _ = setting.take()[0]
    setting.report(slot, tag - 1, Landed.ARRIVED)
    setting.land()
    assert setting.tables.slot_state[slot].item() == SlotState.FETCH
    setting.region.raise_if_failed()


def test_without_a_task_host_memory_is_left_alone(device: torch.device) -> None:
    setting = Setting(device, num_slots=4)
    ensure(setting.tables, 0, torch.tensor([[0]], device=device))
    setting.land()
    assert setting.region.read(Word.POSITION) == 0


def test_landings_that_nobody_asked_for_are_an_error_word(device: torch.device) -> None:
    setting = Setting(device, num_slots=4)
    ensure(setting.tables, 0, torch.tensor([[0]], device=device))
    setting.prefetch(0, [6])
    _, slot, tag, _ = setting.take()[0]
    for _ in range(2):
        setting.report(slot, tag, Landed.ARRIVED)
    setting.land()
    with pytest.raises(RuntimeError, match="a copy that nobody asked for"):
        setting.tables.raise_if_failed()
    setting.tables.raise_if_failed()  # once
    setting.tables.check()


def test_a_required_expert_on_its_way_is_gathered_into_its_own_slot_once(device: torch.device) -> None:
    setting = Setting(device, num_slots=3)
    tables = setting.tables
    ensure(tables, 0, torch.tensor([[0]], device=device))
    setting.prefetch(0, [NUM_EXPERTS + 1])
    key, slot, tag, _ = setting.take()[0]
    assert ensure(tables, 1, torch.tensor([[1]], device=device)).tolist() == [[slot]]
    assert (tables.miss_count.item(), tables.miss_key[0].item()) == (1, key)
    assert ensure(tables, 1, torch.tensor([[1]], device=device)).tolist() == [[slot]]
    assert tables.miss_count.item() == 0  # its bytes are there
    assert tables.slot_state[slot].item() == SlotState.FETCH  # and so is, perhaps, the copy
    setting.report(slot, tag, Landed.DROPPED)
    setting.land()
    assert tables.slot_state[slot].item() == SlotState.COMPUTE
    stats = tables.stats()
    assert (stats.late, stats.hits, stats.misses, stats.prefetches_dropped) == (1, 1, 1, 1)


def packed_records(layout: PackedLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Records `[NUM_KEYS, plain bytes]`, and the same packed."""
    plain = [as_bytes(weights(layout.num_elements, seed=key)) for key in range(NUM_KEYS)]
    packed = [record for record in (pack_reference(each, layout) for each in plain) if record is not None]
    return torch.from_numpy(np.stack(plain)), torch.from_numpy(np.stack(packed))


@pytest.fixture(params=["steady", "slow", "failing", "killed", "hanging"])
def trouble(request: pytest.FixtureRequest) -> str:
    """What becomes of the worker or its link half-way."""
    return str(request.param)


class Decode:
    """Layers as a captured step has them, with a worker over a link that may get into trouble.

    `kind`: what is late is `gathered` at once, or `awaited`; or the bank is `packed`, and it is awaited too.
    """

    def __init__(self, device: torch.device, num_slots: int, kind: str) -> None:
        self.setting, self.is_awaiting = Setting(device, num_slots), kind != "gathered"
        self.setting.kept_back = 2  # what a layer requires, however late the worker is
        self.plain = torch.randint(0, 256, (NUM_KEYS, RECORD_BYTES), dtype=torch.uint8)
        self.layout: PackedLayout | None = None
        stored = self.plain
        if kind == "packed":
            self.layout = PackedLayout(2048)
            self.plain, stored = packed_records(self.layout)
        self.slabs = SlabPool(num_slots, self.plain.shape[1], device)
        self.staging = None
        if self.layout is not None:
            self.staging = torch.zeros(4, stored.shape[1], dtype=torch.uint8, device=device)
        self.link: FakeLink | RealLink
        if device.type == "cuda":
            stored, self.link = stored.pin_memory(), RealLink(device)
            self.bank = MappedBank.of(stored.view(-1), stored.shape[1], self.layout)
        else:
            self.link = FakeLink(delay=20)
            self.link.stop_poisoning()  # a late expert may be read while its own bytes come a second time
            self.bank = MappedBank(stored.data_ptr(), stored.shape[1], self.layout)
        self.worker = PrefetchWorker(
            self.setting.region,
            bank=stored,
            slabs=self.slabs,
            engine=self.link.engine,
            staging=self.staging,
        )

    def layer(self, layer: int, routed: np.ndarray, wanted: list[int]) -> None:
        setting, is_staged = self.setting, self.layout is not None
        landings = Landings(setting.region, self.bank.record_bytes, is_staged=is_staged)
        top_k = torch.from_numpy(routed).to(setting.device)
        slots = ensure(setting.tables, layer, top_k, awaits_late=self.is_awaiting, landings=landings)
        gather(setting.tables, layer, bank=self.bank, slabs=self.slabs)
        if self.is_awaiting:
            keys = torch.tensor(wanted, dtype=torch.int32, device=setting.device)
            asked = Wanted(layer, keys, setting.kept_back)
            await_late(setting.tables, slots, landings, wanted=asked)
            self.bring_rest(layer)
        expected = self.plain[layer * NUM_EXPERTS + torch.from_numpy(routed)]
        assert torch.equal(self.slabs.memory[slots.long()].cpu(), expected)
        if not self.is_awaiting:
            setting.prefetch(layer, wanted)

    def bring_rest(self, layer: int) -> None:
        tables = self.setting.tables
        if self.staging is None:
            gather(tables, layer, bank=self.bank, slabs=self.slabs, is_late=True)
            return
        unpack_landed(
            tables,
            region=self.setting.region,
            staging=self.staging,
            bank=self.bank,
            slabs=self.slabs,
            late_layer=layer,
        )

    def cause(self, trouble: str) -> None:
        if trouble == "slow":
            self.link.set_delay(1000)
        elif trouble == "failing":
            self.link.fail_from_now_on()
        elif trouble == "killed":
            self.setting.region.write(Word.STOP, 1)
        elif trouble == "hanging":
            self.link.stick(True)


@pytest.mark.parametrize("kind", ["gathered", "awaited", "packed"])
@pytest.mark.parametrize("num_slots", [6, 10], ids=lambda n: f"slots{n}")
def test_whatever_befalls_the_worker_bytes_are_right_and_nothing_hangs(
    device: torch.device, num_slots: int, trouble: str, kind: str
) -> None:
    decode = Decode(device, num_slots, kind)
    setting, rng = decode.setting, np.random.default_rng(num_slots)
    try:
        for step in range(24):
            if step == 8:
                decode.cause(trouble)
            layer = step % NUM_LAYERS
            ahead = (layer + 1) % NUM_LAYERS
            wanted = (ahead * NUM_EXPERTS + rng.permutation(NUM_EXPERTS)[:2]).tolist()
            decode.layer(layer, routing(rng, NUM_EXPERTS, (1, 2)), wanted)
            setting.tables.check()
        finish(decode, trouble)
    finally:
        decode.link.stick(False)
        decode.worker.close()
    setting.tables.drop_prefetches()
    setting.tables.to_machine(setting.twin.machine, setting.twin.eviction)


def finish(decode: Decode, trouble: str) -> None:
    """The end of decoding as its orchestrator would see it."""
    if trouble in ("failing", "killed"):
        with pytest.raises(RuntimeError, match="the prefetch worker ended"):
            decode.worker.raise_if_failed()
        return
    if trouble == "hanging":
        with pytest.raises(TimeoutError, match="prefetch tasks are done"):
            decode.worker.drain(timeout_s=0.05)
        return
    decode.worker.raise_if_failed()
    decode.worker.drain()
    decode.setting.land()
    assert decode.setting.num_outstanding == 0
    assert decode.setting.tables.stats().prefetches > 0
