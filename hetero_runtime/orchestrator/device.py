"""The device orchestrator: a decode step decides, loads and computes without asking the host.

    prefill   grouped, on the host's slot machine       waves, prefetch ahead
        │ hand-over of all slot states, exactly (tables.adopt / to_machine)
    decode    for each layer, on the compute stream:
              ensure(top_k_index)   hits, evictions, miss list          one thread block
              gather()              misses: mapped host memory → slabs  count read on the device
              experts(slots)        up, gate, down, weighted sum        weights read in their slabs
              and around them, if experts are prefetched, what `captured_prefetch` adds, and if the CPU
              computes misses, what `captured_in_place` does

Nothing in a decode step depends on a value that the host would have to read, so the step can be captured as
one CUDA graph and replayed for every token (SeqMoE §8). Where prefetches have to pay, it goes one of two
ways, without them and with them, each captured: `way` says which one the pass takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch

from hetero_gpu import CacheStats, SlabCache, SlabPool
from hetero_gpu.experts.decode import DecodeExperts
from hetero_gpu.tables import DeviceTables, MappedBank, ensure, gather
from hetero_runtime.in_place import InPlaceStats
from hetero_runtime.orchestrator.ahead import PredictionStats
from hetero_runtime.orchestrator.base import Orchestrator, Phase
from hetero_runtime.orchestrator.captured_in_place import CapturedInPlace
from hetero_runtime.orchestrator.captured_prefetch import CapturedPrefetch, Pending
from hetero_runtime.orchestrator.plain_steps import PlainSteps
from hetero_scheduler.trials import Trials


class DeviceOrchestrator(Orchestrator):
    """See the module docstring.

    `prefill`: runs the prompts. `active`: bool `[rows]` on the device, the rows whose token counts in a step;
    experts of the others are neither loaded nor computed. `prefetch`: None loads what misses and no more.
    `in_place`: None computes nothing on the CPU.
    """

    mode = "graph"

    def __init__(
        self,
        prefill: Orchestrator,
        *,
        cache: SlabCache,
        slabs: SlabPool,
        bank: MappedBank,
        tables: DeviceTables,
        experts: DecodeExperts,
        active: torch.Tensor,
        prefetch: CapturedPrefetch | None = None,
        in_place: CapturedInPlace | None = None,
    ) -> None:
        self._prefill, self._cache, self._slabs, self._bank = prefill, cache, slabs, bank
        self._tables, self._experts, self._active = tables, experts, active
        self._prefetch, self._in_place = prefetch, in_place
        self._is_on_device = False
        self._is_prefetching = prefetch is not None and prefetch.trials is None
        self._way_asked: int | None = None
        self._phase = Phase.PREFILL

    @contextmanager
    def pass_(self, phase: Phase, *, checkpoint: Callable[[], None]) -> Iterator[None]:
        self._phase = phase
        if phase is Phase.DECODE:
            self._take_way()
        self._hand_over(to_device=phase is Phase.DECODE)
        if phase is Phase.DECODE:
            if self._in_place is not None:
                self._in_place.begin_pass()
            yield
            if self._in_place is not None:
                self._in_place.raise_if_failed()
            self._tables.raise_if_failed()
            if self._prefetch is not None:
                self._prefetch.raise_if_failed()
            return
        with self._prefill.pass_(phase, checkpoint=checkpoint):
            yield

    def expect_prompt(self, num_tokens: int) -> None:
        self._prefill.expect_prompt(num_tokens)

    def run_layer(
        self, layer: int, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        if self._phase is Phase.PREFILL:
            return self._prefill.run_layer(layer, hidden, top_k_index, top_k_weights)
        if len(hidden) > 1:  # a single row is always active in its own step
            top_k_index = torch.where(self._active[: len(hidden), None], top_k_index, -1)
        hidden, index, weights = hidden.contiguous(), top_k_index.contiguous(), top_k_weights.contiguous()
        prefetch, pending = self._prefetching, Pending()
        if prefetch is not None:
            pending = prefetch.begin_layer(layer, index)
        dividing = None if self._in_place is None else self._in_place.begin_layer(hidden, weights)
        slots = ensure(
            self._tables,
            layer,
            index,
            awaits_late=prefetch is not None,
            dividing=dividing,
            **pending._asdict(),
        )
        self._bring(layer, hidden, slots)
        out = torch.empty_like(hidden)
        self._experts(hidden, self._slabs.memory, slots=slots, weights=weights, out=out)
        if self._in_place is not None:
            self._in_place.finish_layer(out)
        return out

    def end_step(self) -> None:
        """All of a decode step is submitted: what goes on beside it ends with it. Capturable."""
        if self._prefetching is not None:
            self._prefetching.end_step()

    def _bring(self, layer: int, hidden: torch.Tensor, slots: torch.Tensor) -> None:
        """What `ensure` put into `slots` is there once all that this submits is done."""
        prefetch = self._prefetching
        if prefetch is not None:
            prefetch.think(layer, len(hidden))
        gather(self._tables, layer, bank=self._bank, slabs=self._slabs)
        if prefetch is not None:
            prefetch.ask_and_await(layer, hidden, slots)

    def device_stats(self) -> CacheStats:
        return self._tables.stats()

    def device_in_place_stats(self) -> InPlaceStats:
        return InPlaceStats() if self._in_place is None else self._in_place.stats()

    def prediction_stats(self) -> PredictionStats:
        return self._prefill.prediction_stats()

    def observe_steps(self, num_steps: int, seconds: float) -> None:
        is_racing = self._prefetch_trials is not None and self._prefetch_trials.is_racing
        if self._prefetch is not None:
            self._prefetch.observe_steps(num_steps, seconds)
        if self._in_place is not None and not is_racing:  # one question at a time
            self._in_place.observe_steps(num_steps, seconds)

    @property
    def num_ways(self) -> int:
        """Ways that a step can still go."""
        trials = self._prefetch_trials
        return 1 if trials is None or trials.is_lost else 2

    @property
    def is_plain(self) -> bool:
        """Whether steps do without the forecasts that there are."""
        return self._prefetch is not None and not self._is_prefetching

    @property
    def way(self) -> int:
        """That of the decode pass that runs. 0: the plain one, or the only one."""
        return int(self._is_prefetching and self._prefetch_trials is not None)

    @contextmanager
    def going(self, way: int) -> Iterator[None]:
        """Decode passes inside go that `way`, whatever is being tried."""
        self._way_asked = way
        try:
            yield
        finally:
            self._way_asked = None

    @property
    def is_settled(self) -> bool:
        all_trials = (self.trials, self._prefetch_trials)
        return not any(trials is not None and trials.is_racing for trials in all_trials)

    @property
    def is_outdated(self) -> bool:
        return self._in_place is not None and self._in_place.is_outdated

    @property
    def trials(self) -> Trials[float] | None:
        """Of shares of the misses that the CPU computes; None where nothing is tried."""
        return None if self._in_place is None else self._in_place.trials

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What decode passes do inside counts neither in `device_stats` nor in `device_in_place_stats`."""
        before = self._tables.counters.clone()
        with nullcontext() if self._in_place is None else self._in_place.uncounted():
            yield
        self._tables.counters.copy_(before)

    def check(self) -> None:
        self._hand_over(to_device=False)
        self._prefill.check()

    def close(self) -> None:
        if self._in_place is not None:
            self._in_place.close()
        if self._prefetch is not None:
            self._prefetch.close()

    def _hand_over(self, *, to_device: bool) -> None:
        """Bring the slot states to where the next pass decides."""
        if to_device == self._is_on_device:
            return
        prefetch, steps = self._prefetching, PlainSteps()
        if prefetch is None and self._prefetch is not None:
            assert self._prefetch.plain is not None, "no step may do without prefetches"
            steps = self._prefetch.plain
        if to_device:
            self._cache.lend(partial(steps.adopt, self._tables))
            if prefetch is not None:
                prefetch.begin_decode()
        else:
            if prefetch is not None:
                prefetch.finish()
            if self._in_place is not None:
                self._in_place.finish()
            self._cache.lend(partial(steps.give_back, self._tables))
        self._is_on_device = to_device

    def _take_way(self) -> None:
        """Let the decode pass that comes prefetch, or not: as asked for, else as is being tried."""
        trials = self._prefetch_trials
        if trials is None:
            return
        is_prefetching = trials.choice if self._way_asked is None else self._way_asked == 1
        if is_prefetching != self._is_prefetching:
            self._hand_over(to_device=False)  # both ways have scores of their own
            self._is_prefetching = is_prefetching

    @property
    def _prefetching(self) -> CapturedPrefetch | None:
        return self._prefetch if self._is_prefetching else None

    @property
    def _prefetch_trials(self) -> Trials[bool] | None:
        return None if self._prefetch is None else self._prefetch.trials
