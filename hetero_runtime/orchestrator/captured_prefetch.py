"""Prefetch inside the captured step: ask for what layers to come need, and await what was asked for.

    layer l     land, ensure ─ gather ─ ask, await late ─ unpack, gather the rest ─┬─ experts ─ … l + 1
                                         │       ▲                                 │             ▲
    beside                               │       │                                 └─ or ask ────┤
    worker      ─────────────────────────┴─ copy ┘        its own thread and stream    └─ copy ──┘

What is asked for is for an `Asker` to say: `AskOneLayerAhead` by a guess, at once; `CapturedForesight` by
forecasts of steps to come and `CapturedLookahead` by those of layers to come, which take longer to make, and
so are made beside the experts and the attention that follow, those of the last layer beside the head.

The device asks and goes on; a host thread copies, and talks to the device through the control region alone.
What has not arrived when its layer runs is awaited while misses load, within bounds. Whether that pays is
found by timing whole steps, with it and without, where the asker may be done without. A worker that fails is
reported once; after that a step is as fast as without prefetch, less the slots that its last tasks hold.
"""

from __future__ import annotations

import logging
from typing import NamedTuple, Protocol

import torch

from hetero_gpu import SlabPool
from hetero_gpu.beside import Beside
from hetero_gpu.control import ControlRegion, CopyEngine, PrefetchWorker
from hetero_gpu.packed.layout import RING_BUFFERS
from hetero_gpu.tables import (
    DeviceTables,
    Landings,
    MappedBank,
    Running,
    Wanted,
    await_late,
    gather,
    land,
    unpack_landed,
)
from hetero_runtime.orchestrator.plain_steps import PlainSteps
from hetero_scheduler.trials import Trials

log = logging.getLogger(__name__)


class LookAhead(Protocol):
    """Guesses what a layer to come will need. Device work alone."""

    def __call__(self, layer: int, hidden: torch.Tensor) -> torch.Tensor | None:
        """Keys (layer * num_experts + expert), int32, contiguous, the most wanted first, -1 for none, as seen
        from `layer`, whose experts take `hidden` `[rows, H]`. None where nothing is to be guessed."""


class Asker:
    """Says what is fetched. What is captured is device work alone."""

    asks_beside = False
    """Whether `ask` runs on a stream of its own, beside the layer's experts and what follows until the next
    `begin_layer`, instead of what is `wanted` being asked for before late copies are awaited. Then what it
    reads of the layer's tensors must be kept (`used_here`)."""

    plain: PlainSteps | None = None
    """How steps go without it; None where none may."""

    def begin_layer(self, layer: int, chosen: torch.Tensor) -> Running | None:
        """`layer` begins for the rows of a step, before its `ensure`. `chosen`: integers `[rows, top_k]`, the
        experts that each uses, below 0 for none. Returns whose windows move on with it, if anybody has."""
        return None

    def wanted(self, layer: int, hidden: torch.Tensor) -> Wanted | None:
        """What is asked for between `ensure(layer)` and the next; None for nothing. `hidden` `[rows, H]`:
        what its experts take."""
        return None

    def think(self, layer: int, num_rows: int) -> None:
        """Right after `ensure(layer)`: begin what takes long and needs no slots, on a stream of its own."""

    def ask(self, layer: int, hidden: torch.Tensor) -> None:
        """Likewise, but of who `asks_beside`: send the tasks."""

    def begin_decode(self) -> None:
        """By the host: the tables were handed over to the device just now."""

    def end_decode(self) -> None:
        """By the host: the tables are handed back next."""


class AskOneLayerAhead(Asker):
    """Asks for what `look_ahead` guesses, and leaves each layer `kept_back` slots."""

    def __init__(self, look_ahead: LookAhead, *, kept_back: int = 0) -> None:
        self._look_ahead, self._kept_back = look_ahead, kept_back

    def wanted(self, layer: int, hidden: torch.Tensor) -> Wanted | None:
        keys = self._look_ahead(layer, hidden)
        return None if keys is None else Wanted(layer, keys, self._kept_back)


class Pending(NamedTuple):
    """What `ensure` is to take note of itself; None: that is done, or there is nothing."""

    landings: Landings | None = None
    running: Running | None = None


class CapturedPrefetch:
    """See the module docstring. `records`: the host bank, uint8, packed if `bank` is.

    `region`: what `tables` are attached to, with a ring of MOST_OUTSTANDING. `engine` carries the bytes.
    `cpus`: as for `PrefetchWorker`. Construction starts that.
    """

    def __init__(
        self,
        asker: Asker,
        *,
        tables: DeviceTables,
        region: ControlRegion,
        bank: MappedBank,
        records: torch.Tensor,
        slabs: SlabPool,
        engine: CopyEngine,
        cpus: frozenset[int] = frozenset(),
    ) -> None:
        self._asker, self._tables, self._bank, self._slabs = asker, tables, bank, slabs
        self._region, self._beside = region, Beside(tables.device)
        self._staging = None
        if bank.packing is not None:
            room = (max(RING_BUFFERS, len(engine.events) + 1), bank.record_bytes)
            self._staging = torch.empty(room, dtype=torch.uint8, device=tables.device)
        self._landings = Landings(region, bank.record_bytes, is_staged=self._staging is not None)
        self._worker = PrefetchWorker(
            self._region,
            bank=records.view(-1, bank.record_bytes),
            slabs=slabs,
            engine=engine,
            staging=self._staging,
            cpus=cpus,
        )
        self._is_failure_told = False
        self.plain = asker.plain
        """How steps go without prefetches; None where none may."""
        self.trials = None if asker.plain is None else Trials((False, True))
        """Whether steps prefetch; None where all do."""

    # ---- captured, for each layer

    def begin_layer(self, layer: int, chosen: torch.Tensor) -> Pending:
        """Before `ensure`, which must await what is late."""
        self._beside.join()
        if self._asker.asks_beside and layer == 0:
            land(self._tables, self._landings)
        running = self._asker.begin_layer(layer, chosen)
        return Pending(None if self._asker.asks_beside else self._landings, running)

    def think(self, layer: int, num_rows: int) -> None:
        """After `ensure`, before misses are loaded."""
        self._asker.think(layer, num_rows)

    def ask_and_await(self, layer: int, hidden: torch.Tensor, slots: torch.Tensor) -> None:
        """After the misses of `layer` are being loaded. What reads `slots` afterwards finds its experts."""
        wanted = None if self._asker.asks_beside else self._asker.wanted(layer, hidden)
        await_late(self._tables, slots, self._landings, wanted=wanted)
        if self._staging is None:
            gather(self._tables, layer, bank=self._bank, slabs=self._slabs, is_late=True)
        else:
            self._unpack(self._staging, late_layer=layer)
        if self._asker.asks_beside:
            with self._beside.begin():
                self._asker.ask(layer, hidden)
                if layer < self._tables.num_layers - 1:
                    land(self._tables, self._landings)  # for the layer to come

    def end_step(self) -> None:
        """After all else of a step: what was begun beside it ends with it."""
        self._beside.join()

    # ---- by the host, between passes

    def begin_decode(self) -> None:
        """The tables were handed over to the device just now."""
        self._asker.begin_decode()

    def observe_steps(self, num_steps: int, seconds: float) -> None:
        """So many steps, with prefetches if `trials` says so, took so long; in the order of the steps."""
        if self.trials is None or self.trials.is_lost:
            return
        self.trials.observe(num_steps, seconds)
        if self.trials.is_lost:
            log.warning(
                "tokens are decoded without forecasts from now on: a step takes %.2f ms so, and %.2f ms with "
                "them; prompts keep theirs",
                1e3 * self.trials.plain_s,
                1e3 * self.trials.helped_s,
            )

    def raise_if_failed(self) -> None:
        """Raise RuntimeError for the first failure of the worker, once."""
        if self._is_failure_told:
            return
        try:
            self._worker.raise_if_failed()
        except RuntimeError:
            self._is_failure_told = True
            raise

    def finish(self) -> None:
        """Bring every task to its end, so that the host may take the slots over. Waits for the device and for
        copies under way; raises TimeoutError when one does not end."""
        self._asker.end_decode()
        if self._tables.device.type == "cuda":
            torch.cuda.synchronize(self._tables.device)
        if not self._worker.is_alive:
            self._tables.drop_prefetches()
            return
        self._worker.drain()
        land(self._tables, self._landings)
        if self._staging is not None:
            self._unpack(self._staging, late_layer=None)

    def close(self) -> None:
        """End the worker; no step may follow."""
        self._worker.close()

    def _unpack(self, staging: torch.Tensor, *, late_layer: int | None) -> None:
        unpack_landed(
            self._tables,
            region=self._region,
            staging=staging,
            bank=self._bank,
            slabs=self._slabs,
            late_layer=late_layer,
        )
