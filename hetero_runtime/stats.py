"""What an engine has done so far, and what its experts cost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from hetero_gpu import CacheStats, SlabCache
from hetero_runtime.config.tree import Mode
from hetero_runtime.in_place import InPlaceStats
from hetero_runtime.orchestrator import Orchestrator, Phase
from hetero_runtime.orchestrator.ahead import PredictionStats
from hetero_runtime.own_memory import peak_rss_bytes
from hetero_runtime.profiling import mark_stall, span
from hetero_runtime.routing import CountsRouting, RoutingStats
from hetero_runtime.tiers.reading import ReadStats
from hetero_runtime.vision.stats import CompressionStats
from hetero_scheduler import SlotCounts


@dataclass(frozen=True)
class PhaseStats:
    """Prefill or decode. Times are host seconds inside passes; stalls are waits of computation for copies."""

    passes: int
    tokens: int
    seconds: float
    stall_s: float
    cache: CacheStats
    routing: RoutingStats
    in_place: InPlaceStats = field(default_factory=InPlaceStats)
    """Of the experts required, those that the CPU computed where they lie, and the time that it took."""
    prediction: PredictionStats = field(default_factory=PredictionStats)
    """Of the time, what forecasts took of it."""

    @property
    def tok_s(self) -> float:
        """Tokens a second of this phase."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def cpu_share(self) -> float:
        """Part of the required experts that the CPU computed in place of the device."""
        return self.in_place.experts / self.cache.required if self.cache.required else 0.0


@dataclass(frozen=True)
class DraftStats:
    """What drafts brought: a pass gives one token of the model's own, and those of its draft it accepts."""

    passes: int = 0
    """Passes that checked a draft, or had none to check."""
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    """Spent drafting; a part of the time of decode."""

    @property
    def tokens_per_pass(self) -> float:
        """Acceptance length, tau: committed tokens a pass. 0 without a pass."""
        return (self.accepted + self.passes) / self.passes if self.passes else 0.0


@dataclass(frozen=True)
class EngineStats:
    """A snapshot. `slots` counts slots by state; `disk` what was read from below host memory."""

    mode: Mode
    """How decode steps run: what was decided, or eager where the step could not be captured after all."""
    requests: int
    active_rows: int
    prefill: PhaseStats
    decode: PhaseStats
    slots: SlotCounts
    bank_bytes: int
    slab_bytes: int
    peak_rss_bytes: int
    """Of this process alone; see `own_memory` for what a system without /proc can say."""
    peak_device_bytes: int
    disk: ReadStats
    drafts: DraftStats = DraftStats()
    compression: CompressionStats = field(default_factory=CompressionStats)

    @property
    def prefetches_open(self) -> int:
        """Prefetches of both phases that nothing has required so far; all others were used, late or wasted,
        and count in the phase in which that turned out: what a prompt fetched, decode may use."""
        return (self.prefill.cache + self.decode.cache).prefetches_open

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and names, for `--json`."""
        result = asdict(self)
        result["prefetches_open"] = self.prefetches_open
        result["slots"], result["disk"] = self.slots._asdict(), self.disk._asdict()
        for phase in ("prefill", "decode"):
            stats: PhaseStats = getattr(self, phase)
            result[phase] |= {
                "tok_s": stats.tok_s,
                "hit_rate": stats.cache.hit_rate,
                "cpu_share": stats.cpu_share,
                "prediction_ms_a_layer": stats.prediction.ms_a_layer,
            }
            result[phase]["routing"] |= stats.routing.per_token(stats.tokens)
        result["drafts"]["tokens_per_pass"] = self.drafts.tokens_per_pass
        result["compression"] = self.compression.to_json()
        return result


class StatsRecorder:
    """Adds up passes by phase. Thread-safe."""

    def __init__(
        self, cache: SlabCache, orchestrator: Orchestrator, routing: CountsRouting | None = None
    ) -> None:
        self._cache, self._orchestrator, self._routing = cache, orchestrator, routing
        self._guard = threading.Lock()
        # what the device counted before, while somebody tried these parts out
        self._before = orchestrator.device_stats()
        self._in_place_before = orchestrator.device_in_place_stats()
        self._routed_before = self._device_routing()
        self._phases = {phase: PhaseStats(0, 0, 0.0, 0.0, CacheStats(), RoutingStats()) for phase in Phase}
        self._drafts = DraftStats()
        self._requests = 0
        self._active_rows = 0

    @contextmanager
    def request(self) -> Iterator[None]:
        """Around one request that holds a row."""
        with self._guard:
            self._requests += 1
            self._active_rows += 1
        try:
            yield
        finally:
            with self._guard:
                self._active_rows -= 1

    @contextmanager
    def pass_(self, phase: Phase, *, num_tokens: int, num_passes: int = 1) -> Iterator[None]:
        """Around forward passes (the caller has the turn); what is given up counts no tokens."""
        before, routed = self._cache.stats(), self._routing_stats()
        stalled, began = self._cache.stall_s(), time.perf_counter()
        in_place = self._orchestrator.in_place_stats()
        predicted = self._orchestrator.prediction_stats()
        is_whole = False
        try:
            with span(phase.value):
                yield
            is_whole = True
        finally:
            old, stall_s = self._phases[phase], self._cache.stall_s() - stalled
            mark_stall(stall_s)
            with self._guard:
                self._phases[phase] = PhaseStats(
                    passes=old.passes + num_passes * is_whole,
                    tokens=old.tokens + num_tokens * is_whole,
                    seconds=old.seconds + time.perf_counter() - began,
                    stall_s=old.stall_s + stall_s,
                    cache=old.cache + (self._cache.stats() - before),
                    routing=old.routing + (self._routing_stats() - routed),
                    in_place=old.in_place + (self._orchestrator.in_place_stats() - in_place),
                    prediction=old.prediction + (self._orchestrator.prediction_stats() - predicted),
                )

    def drafted(self, num_tokens: int, *, accepted: int, seconds: float) -> None:
        """Inside a decode pass that counts one token: it checked a draft of `num_tokens`, which took
        `seconds` to make, and `accepted` of them came besides."""
        with self._guard:
            old, decode = self._drafts, self._phases[Phase.DECODE]
            self._drafts = DraftStats(
                old.passes + 1, old.drafted + num_tokens, old.accepted + accepted, old.seconds + seconds
            )
            self._phases[Phase.DECODE] = replace(decode, tokens=decode.tokens + accepted)

    def snapshot(
        self,
        *,
        bank_bytes: int,
        slab_bytes: int,
        disk: ReadStats,
        device: torch.device,
        compression: CompressionStats,
    ) -> EngineStats:
        """Everything so far."""
        with self._guard:
            decode = self._phases[Phase.DECODE]
            # waits for what is submitted, so it comes first
            on_device = self._orchestrator.device_stats() - self._before
            in_place = self._orchestrator.device_in_place_stats() - self._in_place_before
            routed = self._device_routing() - self._routed_before
            return EngineStats(
                mode=self._orchestrator.mode,
                requests=self._requests,
                active_rows=self._active_rows,
                prefill=self._phases[Phase.PREFILL],
                decode=replace(
                    decode,
                    cache=decode.cache + on_device,
                    routing=decode.routing + routed,
                    in_place=decode.in_place + in_place,
                ),
                slots=self._cache.counts(),
                bank_bytes=bank_bytes,
                slab_bytes=slab_bytes,
                disk=disk,
                peak_rss_bytes=peak_rss_bytes(),
                peak_device_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
                drafts=self._drafts,
                compression=compression,
            )

    def _device_routing(self) -> RoutingStats:
        return RoutingStats() if self._routing is None else self._routing.device_stats()

    def _routing_stats(self) -> RoutingStats:
        return RoutingStats() if self._routing is None else self._routing.stats()
