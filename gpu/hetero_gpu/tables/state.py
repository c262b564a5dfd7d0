"""The slab cache's tables on the device: what the slot machine and the eviction policy know, as tensors.

Prefill is driven by the host machine, decode by kernels over these tables. The state goes over both ways,
exactly: `adopt` before the first captured step, `to_machine` after the last. Addresses never change, so a
captured graph stays valid over any number of hand-overs.

    slot_of [L, E] ──slot──▶ slot_key, slot_state, slot_tag [S] ──▶ slab at base + slot * record_bytes
       ▲                                │
       └────── layer * E + expert ◀─────┘
"""

from __future__ import annotations

from dataclasses import fields
from typing import NamedTuple

import numpy as np
import torch
import triton

from hetero_gpu.cache_stats import CacheStats
from hetero_gpu.control.fault import TableError
from hetero_gpu.control.region import ControlRegion, Word
from hetero_gpu.limits import MOST_EXPERTS, MOST_PAIRS, MOST_SLOTS
from hetero_scheduler import EvictionPolicy, SlotMachine, SlotState, SlotTable
from hetero_scheduler.slots import NO_SLOT

MOST_LOOKS = 1000
"""Some 1.5 ms, more than two copies of 9 MB take; then the worker counts as stuck."""

COUNTERS = tuple(field.name for field in fields(CacheStats))
NUM_COUNTERS = 16
"""Columns of `counters`: COUNTERS, then padding to a power of two."""


class SlotTables(NamedTuple):
    """Tables of a DeviceTables, which says what they are, as one argument of a kernel."""

    slot_of: torch.Tensor
    slot_key: torch.Tensor
    slot_state: torch.Tensor
    slot_tag: torch.Tensor
    slot_last: torch.Tensor
    is_pinned: torch.Tensor
    is_filled: torch.Tensor
    is_unproven: torch.Tensor
    has_arrived: torch.Tensor
    pools: torch.Tensor
    score: torch.Tensor
    clock: torch.Tensor
    next_tag: torch.Tensor
    position: torch.Tensor
    num_emitted: torch.Tensor
    num_landed: torch.Tensor
    counters: torch.Tensor


class LandedTables(NamedTuple):
    """Landings whose bytes wait in staging buffers, likewise."""

    slot: torch.Tensor
    tag: torch.Tensor
    buffer: torch.Tensor
    number: torch.Tensor


class DeviceTables:
    """See the module docstring. All tensors live on `device`; `max_pairs` is the most of tokens * top_k."""

    def __init__(
        self,
        *,
        num_slots: int,
        num_layers: int,
        num_experts: int,
        max_pairs: int,
        device: torch.device,
    ) -> None:
        """Empty tables. Raises ValueError for sizes beyond what one thread block serves."""
        for name, value, most in (
            ("slots", num_slots, MOST_SLOTS),
            ("experts a layer", num_experts, MOST_EXPERTS),
            ("tokens times top-k", max_pairs, MOST_PAIRS),
        ):
            if not 1 <= value <= most:
                raise ValueError(f"{value} {name}: the device tables serve 1 to {most}")
        self.num_slots, self.num_layers, self.num_experts = num_slots, num_layers, num_experts
        self.max_pairs, self.device = max_pairs, device
        self.policy, self.half_life = "lru", 1.0
        self._region: ControlRegion | None = None
        self._allocate_slots()
        self._allocate_outputs()

    @property
    def for_kernels(self) -> SlotTables:
        """All that kernels share, at addresses that never change."""
        return SlotTables(*(getattr(self, name) for name in SlotTables._fields))

    def layer_sizes(self, num_pairs: int) -> dict[str, int]:
        """What a kernel that decides a layer of `num_pairs` pairs is compiled for. Raises ValueError for more
        pairs than there is room for."""
        if num_pairs > self.max_pairs:
            raise ValueError(
                f"{num_pairs} pairs of token and expert: the tables were made for {self.max_pairs}"
            )
        return {
            "NUM_PAIRS": num_pairs,
            "NUM_SLOTS": self.num_slots,
            "NUM_LAYERS": self.num_layers,
            "NUM_EXPERTS": self.num_experts,
            "PAIR_BLOCK": triton.next_power_of_2(num_pairs),
            "SLOT_BLOCK": triton.next_power_of_2(self.num_slots),
            "LAYER_BLOCK": triton.next_power_of_2(self.num_layers),
            "EXPERT_BLOCK": triton.next_power_of_2(self.num_experts),
        }

    @property
    def landed_for_kernels(self) -> LandedTables:
        """Likewise, once a region is attached."""
        return LandedTables(self.landed_slot, self.landed_tag, self.landed_buffer, self.landed_count)

    def _allocate_slots(self) -> None:
        by_expert, by_slot = (self.num_layers, self.num_experts), (self.num_slots,)
        self.slot_of = self._full(by_expert, torch.int32, NO_SLOT)
        self.slot_key = self._full(by_slot, torch.int32, NO_SLOT)
        self.slot_state = self._full(by_slot, torch.int32, int(SlotState.EMPTY))
        self.slot_tag = self._full(by_slot, torch.int64)
        self.slot_last = self._full(by_slot, torch.int64)
        """`position` when the slot's expert was last required: what the running layer needs is protected."""
        self.is_pinned = self._full(by_slot, torch.int8)
        self.is_filled = self._full(by_slot, torch.int8)
        """Of a FETCH slot: 1, its bytes were gathered on demand while its prefetch was still under way; 2,
        the running layer awaits them. Either way its landing does not give it up."""
        self.is_unproven = self._full(by_slot, torch.int8)
        """Whether the slot's expert was prefetched and has not been required since."""
        self.has_arrived = self._full(by_slot, torch.int8)
        """Whether the last landing of this slot brought bytes."""
        self.pools = self._full((self.num_layers, 2), torch.int32)
        self.score = self._full(by_expert, torch.float64)
        self.clock = self._full((self.num_layers,), torch.int64)
        self.next_tag = self._full((1,), torch.int64, 1)
        self.position = self._full((1,), torch.int64)
        """Layers begun since the tables were made; never goes back."""

    def _allocate_outputs(self) -> None:
        self.slot_of_pair = self._full((self.max_pairs,), torch.int32, NO_SLOT)
        self.miss_slot = self._full((self.max_pairs,), torch.int32, NO_SLOT)
        self.miss_key = self._full((self.max_pairs,), torch.int32, NO_SLOT)
        self.miss_count = self._full((1,), torch.int32)
        self.late_slot = self._full((self.max_pairs,), torch.int32, NO_SLOT)
        self.late_key = self._full((self.max_pairs,), torch.int32, NO_SLOT)
        self.late_count = self._full((1,), torch.int32)
        """What the running layer awaited in vain, to be gathered after all."""
        self.programs_done = self._full((1,), torch.int32)
        """Programs of a running gather that have finished; 0 between gathers."""
        self.counters = self._full((self.num_layers, NUM_COUNTERS), torch.int64)
        self.error = self._full((1,), torch.int64)
        self.pause = self._full((1,), torch.int64)
        self.error_address, self.pause_address = self.error.data_ptr(), self.pause.data_ptr()
        self.num_emitted = self._full((1,), torch.int64)
        self.num_landed = self._full((1,), torch.int64)
        """Prefetch tasks sent, and landings taken note of; the difference is on its way."""
        self.num_consumed = self._full((1,), torch.int64)
        """What CONSUMED says: landings of which the worker may use the buffers again."""
        self.patience = self._full((1,), torch.int32, MOST_LOOKS)
        """How often a layer looks for a landing that it awaits; 0 once it did so in vain, until one comes."""
        self._allocate_landed(1)

    def _allocate_landed(self, ring_size: int) -> None:
        self.landed_slot = self._full((ring_size,), torch.int32, NO_SLOT)
        self.landed_tag = self._full((ring_size,), torch.int64)
        self.landed_buffer = self._full((ring_size,), torch.int32)
        self.landed_count = self._full((1,), torch.int32)
        """Landings whose bytes are still packed, in staging buffers."""

    def _full(self, shape: tuple[int, ...], dtype: torch.dtype, value: int = 0) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype, device=self.device)

    @property
    def num_warps(self) -> int:
        """Of a kernel that holds all slots: sixteen a thread at most, so that they fit in registers."""
        return 4 if self.num_slots <= 2048 else 8 if self.num_slots <= 4096 else 16

    def attach(self, region: ControlRegion) -> None:
        """Report errors and pauses in `region`; before anything is captured or a worker starts."""
        region.restart(int(self.num_emitted.item()))
        self.num_consumed.copy_(self.num_emitted)
        self._allocate_landed(region.ring_size)
        self._region = region
        self.error_address = region.address(Word.ERROR)
        self.pause_address = region.address(Word.PAUSE)

    # ---- hand-over; each of these waits for the device

    @classmethod
    def from_machine(
        cls, machine: SlotMachine, eviction: EvictionPolicy, *, max_pairs: int, device: torch.device
    ) -> DeviceTables:
        """Tables of the machine's sizes, holding its state."""
        tables = cls(
            num_slots=machine.num_slots,
            num_layers=machine.num_layers,
            num_experts=machine.num_experts,
            max_pairs=max_pairs,
            device=device,
        )
        tables.adopt(machine, eviction)
        return tables

    def adopt(self, machine: SlotMachine, eviction: EvictionPolicy) -> None:
        """Take over the state of `machine` and `eviction`; the host changes neither until `to_machine`.

        Policy and half-life are compiled into captured kernels, so they must stay those of the capture.
        Raises ValueError while the host still fetches something: its copies would land unseen.
        """
        if machine.counts().fetch:
            raise ValueError(
                f"{machine.counts().fetch} slots are being fetched by the host: drain them first"
            )
        self.policy, self.half_life = eviction.name, eviction.half_life
        self.load(machine.export())
        bounds = [(pool.start, pool.stop) for pool in map(machine.pool_range, range(self.num_layers))]
        self._put(self.pools, np.array(bounds, dtype=np.int32))
        self._put(self.score, eviction.score)
        self._put(self.clock, eviction.passes)

    def to_machine(self, machine: SlotMachine, eviction: EvictionPolicy) -> None:
        """Give the state back. Raises ValueError while a prefetch is under way: land them all first."""
        table = self.export()
        num_fetching = int(np.count_nonzero(table.state == SlotState.FETCH))
        if num_fetching:
            raise ValueError(f"{num_fetching} slots await a prefetch: land them before the host takes over")
        machine.restore(table)
        eviction.restore(self.score.cpu().numpy(), self.clock.cpu().numpy())

    def load(self, table: SlotTable) -> None:
        """Hold the slots that `table` says; scores stay."""
        slot_of = np.full(self.num_layers * self.num_experts, NO_SLOT, dtype=np.int32)
        held = np.flatnonzero(table.key != NO_SLOT)
        slot_of[table.key[held]] = held
        self._put(self.slot_of, slot_of.reshape(self.num_layers, self.num_experts))
        self._put(self.slot_key, table.key)
        self._put(self.slot_state, table.state)
        self._put(self.slot_tag, table.tag)
        self._put(self.is_pinned, table.is_pinned)
        self.is_filled.zero_()
        self.is_unproven.zero_()  # what the host fetched is not followed from now on
        self.next_tag.fill_(table.next_tag)

    def export(self) -> SlotTable:
        """The slots as the host machine would describe them."""
        return SlotTable(
            state=self.slot_state.cpu().numpy().astype(np.int8),
            key=self.slot_key.cpu().numpy().copy(),
            tag=self.slot_tag.cpu().numpy().copy(),
            is_pinned=self.is_pinned.cpu().numpy().astype(bool),
            next_tag=int(self.next_tag.item()),
        )

    def drop_prefetches(self) -> None:
        """FETCH→EMPTY, after the worker was closed without landing them: none of its copies is under way."""
        table = self.export()
        fetching = table.state == SlotState.FETCH
        num_wasted = int(self.is_unproven.cpu().numpy()[fetching].sum())
        self.counters[0, COUNTERS.index("prefetches_wasted")] += num_wasted
        table.state[fetching], table.key[fetching] = SlotState.EMPTY, NO_SLOT
        self.load(table)
        self.landed_count.zero_()
        self.num_landed.copy_(self.num_emitted)
        self.num_consumed.copy_(self.num_emitted)
        if self._region is not None:
            self._region.restart(int(self.num_emitted.item()))

    def stats(self) -> CacheStats:
        """What the kernels counted, all layers together, since the tables were made."""
        return CacheStats(*self.counters.sum(0).tolist()[: len(COUNTERS)])

    def raise_if_failed(self) -> None:
        """Raise RuntimeError for what a kernel reported, once.

        Waits for the device, unless a region is attached: its word may be read at any time.
        """
        if self._region is not None:
            self._region.raise_if_failed()
            return
        code = TableError(int(self.error.item()))
        if code is not TableError.NONE:
            self.error.zero_()
            raise RuntimeError(code.explain())

    def check(self) -> None:
        """Assert that slots are conserved and both tables agree."""
        table = self.export()
        machine = SlotMachine(self.num_slots, num_layers=self.num_layers, num_experts=self.num_experts)
        machine.restore(table)
        slot_of = self.slot_of.flatten().cpu().numpy()
        held = np.flatnonzero(slot_of != NO_SLOT)
        assert held.size == np.count_nonzero(table.key != NO_SLOT), (
            f"{held.size} experts mapped, slots disagree"
        )
        assert (table.key[slot_of[held]] == held).all(), "slot_of and slot_key disagree"

    def _put(self, tensor: torch.Tensor, values: np.ndarray) -> None:
        tensor.copy_(torch.from_numpy(np.ascontiguousarray(values)))
