"""What fills the slabs that computation reads, for each place where experts live.

    backing    device cpu            unified                a device with memory of its own
    ram        bank ─copy─► slab     slabs are the bank     bank ─link─► slab
    others     source ─read─► slab   source ─read─► slab    source ─read─► host slab ◄─link─► slab

On device cpu a slab is host memory already, and on unified memory it is both, so nothing lies there twice.
Host slabs are not registered with CUDA, which would lock them: copies go through a small pinned ring, and
slabs can be given back. Mapped ones, of unified memory, cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hetero_gpu import Copier, LinkCopier, MappedSlabs, Record, SlabCache, SlabPool, make_copier
from hetero_gpu.cuda_transfer import fence_of
from hetero_gpu.host_memory import Registration
from hetero_runtime.config import ResolvedConfig
from hetero_runtime.experts.base import ExpertStore
from hetero_runtime.experts.store import BankStore
from hetero_runtime.foresight.link import Link, SteadyLink, measure_link
from hetero_runtime.no_room import no_room_for
from hetero_runtime.plan.demand import returning_records
from hetero_runtime.tiers.base import StoredRecord
from hetero_runtime.tiers.host_slabs import HostSlabs
from hetero_runtime.tiers.in_the_bank import LyingCopier, LyingRecord
from hetero_runtime.tiers.reading import ReadingCopier, ReadStats
from hetero_runtime.tiers.returning import ReturningRecords
from hetero_runtime.tiers.two_hops import TwoHopCopier
from hetero_scheduler import EvictionPolicy, ExpertKey, SlotMachine

NUM_READERS = 4
"""Reads at once: enough that a disk streams."""
_NO_ROOM_FIX = "lower memory.slabs (or memory.residency), or memory.pinned_prefix"


@dataclass(frozen=True)
class HostTier:
    """Host slabs between a source and the device's. `copier`: moves records through them."""

    slabs: HostSlabs
    cache: SlabCache
    copier: TwoHopCopier


@dataclass(frozen=True)
class Supply:
    """A copier, and what a record is to it. `link`: how long a copy takes; it may have to be measured.

    `reads`: who reads the source, `host`: what it reads to on its way to a device; None where there is none.
    """

    copier: Copier[Any]
    record: Callable[[ExpertKey], Record]
    link: Callable[[], Link]
    reads: ReadingCopier | None = None
    host: HostTier | None = None

    def read_stats(self) -> ReadStats:
        """What was read from below host memory; zeros where nothing lies there."""
        stats = ReadStats() if self.reads is None else self.reads.stats()
        return stats if self.host is None else stats._replace(spared=self.host.copier.num_spared)

    def close(self) -> None:
        """Wait for copies under way, end threads, free the host slabs. Safe to call twice."""
        self.copier.close()
        if self.host is not None:
            self.host.slabs.close()


def make_slabs(
    config: ResolvedConfig, store: ExpertStore, *, num_slabs: int, device: torch.device
) -> SlabPool:
    """What computation on `device` reads experts from. Raises DeviceError when it has no room for them."""
    record_bytes = store.layout.record_bytes
    if config.slabs_are_bank:
        assert isinstance(store, BankStore), "what is not read lies in a bank"
        return SlabPool(num_slabs, record_bytes, device, memory=store.records_on_device)
    what = f"{num_slabs} slabs of {record_bytes / 1e6:.1f} MB ({num_slabs * record_bytes / 1e9:.2f} GB)"
    with no_room_for(what, device, fix=_NO_ROOM_FIX):
        if config.device == "unified":
            return MappedSlabs(num_slabs, record_bytes)
        if store.source is not None and device.type == "cpu":
            return HostSlabs(num_slabs, record_bytes)
        return SlabPool(num_slabs, record_bytes, device)


def make_supply(
    config: ResolvedConfig, store: ExpertStore, slabs: SlabPool, *, eviction: EvictionPolicy
) -> Supply:
    """What fills `slabs` from `store`. `eviction` also says what leaves host slabs, if there are any."""
    if store.source is None:
        assert isinstance(store, BankStore), "what is not read lies in a bank"
        return _in_bank(store, slabs) if config.slabs_are_bank else _from_bank(store, slabs)
    if config.device == "cuda":
        return _over_host(config, store, slabs, eviction=eviction)
    device = slabs.memory.device
    fence = partial(fence_of, device) if device.type == "cuda" else None
    reads = ReadingCopier(store.source, num_threads=NUM_READERS, fence=fence)
    return Supply(reads, _stored(store), lambda: reads, reads)


def _from_bank(store: BankStore, slabs: SlabPool) -> Supply:
    device, registration = slabs.memory.device, store.register()
    with no_room_for("copies on their way", device, fix="lower memory.slabs, or memory.pinned_prefix"):
        copier = make_copier(
            device, registration=registration, record_bytes=store.stored_bytes, packing=store.packing
        )
    first = ExpertKey(0, 0)
    return Supply(copier, store.record, lambda: measure_link(copier, store.record(first), slabs.slab(0)))


def _in_bank(store: BankStore, slabs: SlabPool) -> Supply:
    link = SteadyLink(overlaps=False, seconds=0.0)
    return Supply(LyingCopier(slabs), lambda key: LyingRecord(store.table.row(key)), lambda: link)


def _over_host(
    config: ResolvedConfig, store: ExpertStore, slabs: SlabPool, *, eviction: EvictionPolicy
) -> Supply:
    assert store.source is not None, "what lies in a bank needs no host slabs"
    device, record_bytes = slabs.memory.device, store.layout.record_bytes
    host_slabs = HostSlabs(config.memory.host_slabs, record_bytes)
    with no_room_for("copies on their way", device, fix="lower memory.slabs, or memory.pinned_prefix"):
        staging = Registration("staging", "host slabs are not locked, so that they can be given back")
        link = make_copier(device, registration=staging, record_bytes=record_bytes)
        returning = _make_returning(config, store, link, device)
    link_s = measure_link(link, host_slabs.slab(0), slabs.slab(0)).seconds
    reads = ReadingCopier(returning or store.source, num_threads=NUM_READERS)
    machine = SlotMachine(host_slabs.num_slabs, num_layers=store.num_layers, num_experts=store.num_experts)
    host = SlabCache(
        slabs=host_slabs, machine=machine, eviction=eviction, copier=reads, record=_stored(store, returning)
    )
    copier = TwoHopCopier(host, eviction=eviction, reads=reads, link=link, link_s=link_s, returning=returning)
    return Supply(copier, _stored(store), lambda: copier, reads, HostTier(host_slabs, host, copier))


def _make_returning(
    config: ResolvedConfig, store: ExpertStore, link: LinkCopier, device: torch.device
) -> ReturningRecords | None:
    """None where host slabs are no more than a way: the system itself keeps what it can, or they are few."""
    count = returning_records(config.memory.backing, config.memory.host_slabs)
    if not count:
        return None
    assert store.source is not None, "what lies in a bank need not return"
    shape = count, store.layout.record_bytes
    buffers = torch.empty(shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return ReturningRecords(store.source, link, buffers)


def _stored(
    store: ExpertStore, returning: ReturningRecords | None = None
) -> Callable[[ExpertKey], StoredRecord]:
    record_bytes = store.layout.record_bytes
    if returning is None:
        return lambda key: StoredRecord(key, record_bytes)
    return lambda key: StoredRecord(key, 0 if returning.has(key) else record_bytes)
