"""The reference: the host's slot machine and eviction policy, told what the device tables are told."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hetero_gpu import CacheStats
from hetero_scheduler import (
    EvictionPolicy,
    ExpertKey,
    Lookup,
    Reservation,
    SlotMachine,
    SlotState,
    make_eviction,
)


@dataclass
class HostTwin:
    machine: SlotMachine
    eviction: EvictionPolicy
    required: set[ExpertKey] = field(default_factory=set)
    """By the last layer."""
    filled: set[ExpertKey] = field(default_factory=set)
    """Gathered although their prefetch was under way."""
    unproven: set[ExpertKey] = field(default_factory=set)
    """Prefetched, and not required since."""
    stats: CacheStats = field(default_factory=CacheStats)
    """What is decided here: whatever the link tells is left out."""

    @classmethod
    def of(
        cls,
        num_slots: int,
        num_layers: int,
        num_experts: int,
        *,
        policy: str,
        layer_slots: list[int] | None = None,
    ) -> HostTwin:
        return cls(
            SlotMachine(num_slots, num_layers=num_layers, num_experts=num_experts, layer_slots=layer_slots),
            make_eviction(policy, num_layers=num_layers, num_experts=num_experts),
        )

    def ensure(self, layer: int, top_k_index: np.ndarray) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """Slots of the pairs and the miss list (slot, key)."""
        m, chosen = self.machine, top_k_index[top_k_index >= 0]
        self.eviction.observe(layer, np.bincount(chosen, minlength=m.num_experts))
        m.release_layer(layer)
        keys = [ExpertKey(layer, expert) for expert in np.unique(chosen).tolist()]
        self.required = set(keys)
        self._count(keys)
        misses = []
        for key in keys:
            answer = m.lookup(key)
            if answer is Lookup.HIT or key in self.filled:
                continue
            if answer is Lookup.PENDING:
                self.filled.add(key)
            elif self._reserve(key, SlotState.COMPUTE) is None:
                continue
            misses.append((m.slot(key), layer * m.num_experts + key.expert))
        m.release_layer(layer)
        row = m.export()
        slot_of = {int(key): slot for slot, key in enumerate(row.key)}
        pairs = [
            slot_of.get(layer * m.num_experts + e, -1) if e >= 0 else -1 for e in top_k_index.ravel().tolist()
        ]
        return np.array(pairs, dtype=np.int32).reshape(top_k_index.shape), misses

    def prefetch(self, keys: list[int], room: int, *, kept_back: int = 0) -> list[Reservation]:
        """Reserve for at most `room` of `keys` (flat; -1: none); `kept_back` slots of the one pool stay."""
        made: list[Reservation] = []
        for flat in keys:
            if flat < 0 or len(made) == room:
                continue
            key = ExpertKey(*divmod(flat, self.machine.num_experts))
            counts = self.machine.counts()
            if self.machine.lookup(key) is Lookup.MISS and counts.empty + counts.used > kept_back:
                held = self._reserve(key, SlotState.FETCH)
                if held is not None:
                    made.append(held)
                    self.unproven.add(key)
                    self.stats.prefetches += 1
        return made

    def land(self, slot: int, tag: int, *, has_arrived: bool) -> None:
        key = self.machine.key(slot)
        if has_arrived or key in self.filled:
            self.machine.land(slot, tag)
        else:
            self.machine.abort(slot, tag)
            self._leave(key)
        self.filled.discard(key)  # type: ignore[arg-type]

    def _count(self, keys: list[ExpertKey]) -> None:
        answers = [Lookup.HIT if key in self.filled else self.machine.lookup(key) for key in keys]
        hits = {key for key, answer in zip(keys, answers, strict=True) if answer is Lookup.HIT}
        self.stats += CacheStats(
            required=len(keys),
            hits=len(hits),
            late=answers.count(Lookup.PENDING),
            misses=answers.count(Lookup.MISS),
            hits_prefetched=len(hits & self.unproven),
            stalls=len(hits) < len(keys),
        )
        self.unproven -= set(keys)

    def _reserve(self, key: ExpertKey, state: SlotState) -> Reservation | None:
        held = self.machine.reserve(key, state, score=self.eviction.score, protected=self.required)
        if held is not None and held.evicted is not None:
            self.stats.evictions += 1
            self._leave(held.evicted)
        return held

    def _leave(self, key: ExpertKey | None) -> None:
        if key in self.unproven:
            self.unproven.remove(key)
            self.stats.prefetches_wasted += 1
