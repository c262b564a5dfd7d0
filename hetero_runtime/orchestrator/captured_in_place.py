"""Misses that the CPU computes inside the captured step: the device rings, a host thread answers.

    layer l     ensure: divides, calls ─ gather ─ experts ─ add the answer
                          │                          ▲
    host thread    listens└─ the CPU computes ───────┘     while the device loads and computes its own share

How many of a layer's misses go to the CPU is a table of the host; which ones, the device decides. A policy
that splits by cost is not asked for the table: shares are tried in turn, and the time of whole steps decides
(`hetero_scheduler.trials`). Whatever the share, a layer loads one of its misses every few tokens, or the
slabs would keep what lay there at the beginning, of which a text needs less and less. A share of 1 alone
loads nothing: where the CPU is that much faster than the link it is the best while texts are short, and as
whoever is kept is still timed, it goes when it no longer is. Where no share helps, the log says so once, and
a step that is captured anew asks nobody any more.

The device waits within bounds: a thread that died or hangs makes an error of the pass, and no hung device.
What a backend raised is raised after the pass. A thread that died is told of once, with the first thing that
went wrong, and the next pass has another.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hetero_gpu.control import ControlRegion, Word
from hetero_gpu.control.fault import TableError
from hetero_gpu.in_place import MOST_LOOKS, Calls, Mailbox
from hetero_gpu.tables import TURNS, DeviceTables, Dividing, Division
from hetero_runtime.errors import DeviceError
from hetero_runtime.in_place import InPlaceExperts, InPlaceStats
from hetero_runtime.in_place.answers import CallLine, make_answers
from hetero_scheduler.misses import SHARES, FixedShare, LayerDemand, MissPolicy
from hetero_scheduler.trials import Trials

log = logging.getLogger(__name__)

_JOIN_S = 15.0
_POLL_S = 1e-4


class CapturedInPlace:
    """See the module docstring. `region`: what `tables` are attached to; `hidden`: H. `top_k`: of a row.

    Construction compiles what answers (a second or two) and starts its thread. `experts` is closed
    with this.
    """

    def __init__(
        self,
        experts: InPlaceExperts,
        policy: MissPolicy,
        *,
        tables: DeviceTables,
        region: ControlRegion,
        hidden: int,
        top_k: int,
    ) -> None:
        self._experts, self._tables, self._region = experts, tables, region
        self._top_k = top_k
        mailbox = Mailbox(tables.device, rows=tables.max_pairs // top_k, hidden=hidden, top_k=top_k)
        self._calls = Calls(mailbox, region, tables.device)
        self._division = Division(tables, self._calls)
        self._answers = make_answers(experts, CallLine(mailbox, region))
        self._uncounted = InPlaceStats()
        self._is_asking = True
        self._failure: BaseException | None = None
        self._is_closing = False
        self.trials = Trials(SHARES) if policy.is_tried else None
        """Of shares of a layer's misses; None where `policy` says how many."""
        self._share = 0.0
        if self.trials is None:
            self._write_table(policy, turns_to_load=0)
        self._thread = self._start()

    # ---- captured, for each layer

    def begin_layer(self, hidden: torch.Tensor, weights: torch.Tensor) -> Dividing | None:
        """What `ensure` is to hand to the CPU of a layer whose experts take `hidden` `[T, H]`, by `weights`
        `[T, K]`; None where all is loaded."""
        self._is_asking = not self._is_lost
        return Dividing(self._division, hidden, weights) if self._is_asking else None

    def finish_layer(self, out: torch.Tensor) -> None:
        """Add the CPU's share to `out` `[T, H]`."""
        if self._is_asking:
            self._calls.add_answer(out, error_address=self._tables.error_address)

    # ---- by the host, between passes

    @property
    def is_outdated(self) -> bool:
        """The step that is captured asks the CPU, which was given up since."""
        return self._is_asking and self._is_lost and not self._is_closing

    def begin_pass(self) -> None:
        """Put another thread in the place of one that died, which waits for the device; give the device the
        share that is to be tried now, which waits for nothing."""
        if not self._thread.is_alive():
            self.finish()
        if self.trials is not None and self.trials.choice != self._share:
            self._share = self.trials.choice
            self._write_table(FixedShare(self._share), turns_to_load=int(self._share < 1))

    def observe_steps(self, num_steps: int, seconds: float) -> None:
        """So many steps took the device so long; in the order of the steps."""
        if self.trials is None or self._is_lost:
            return
        self.trials.observe(num_steps, seconds)
        if self._is_lost:
            _say_lost(self.trials)

    def raise_if_failed(self) -> None:
        """Raise the first thing that went wrong on the CPU, once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def finish(self) -> None:
        """Bring every call to its end, so that the next pass begins afresh. Waits for the device."""
        if self._tables.device.type == "cuda":
            torch.cuda.synchronize(self._tables.device)
        end = time.monotonic() + _JOIN_S
        while self._region.read(Word.ANSWERS) < self._region.read(Word.CALLS) and self._thread.is_alive():
            if time.monotonic() > end:
                raise DeviceError(
                    f"after {_JOIN_S:.0f} s the CPU still computes experts of a pass that ended"
                )
            time.sleep(_POLL_S)
        self._calls.patience.fill_(MOST_LOOKS)
        if not self._thread.is_alive():
            self._region.forget(TableError.NO_ANSWER)  # its end is told, or will be, in place of that
            self._thread = self._start()

    def stats(self) -> InPlaceStats:
        """Since the engine began, but for what was `uncounted`."""
        return self._answers.stats() - self._uncounted

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What is computed inside counts in no `stats`. Waits for the device."""
        before = self._answers.stats()
        yield
        self.finish()
        self._uncounted += self._answers.stats() - before

    def close(self) -> None:
        """End the thread and the backend; no step may follow."""
        self._is_closing = True
        self._region.write(Word.STOP, 1)
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            raise TimeoutError(f"after {_JOIN_S:.0f} s the CPU still computes experts")
        self._experts.close()

    @property
    def _is_lost(self) -> bool:
        return self.trials is not None and self.trials.is_lost

    def _write_table(self, policy: MissPolicy, *, turns_to_load: int) -> None:
        """How many of so many misses are computed in place; as many experts as a row has are needed. In so
        many of the turns one is loaded in any case."""
        numbers = []
        for num_misses in range(self._tables.max_pairs + 1):
            num_hits = max(0, self._top_k - num_misses)
            demand = LayerDemand([1] * num_hits, [1] * num_misses, range(num_misses), num_empty=0)
            number = len(policy.choose(demand))
            fewer = min(number, max(0, num_misses - 1))
            numbers.append([fewer] * turns_to_load + [number] * (TURNS - turns_to_load))
        is_cuda = self._tables.device.type == "cuda"
        table = torch.tensor(numbers, dtype=torch.int32, pin_memory=is_cuda)
        self._division.number_of.copy_(table, non_blocking=True)

    # ---- the thread

    def _start(self) -> threading.Thread:
        """A thread that answers the calls to come; the device has nothing to do."""
        answered = self._region.read(Word.CALLS)
        self._region.write(Word.ANSWERS, answered)
        self._region.write(Word.STOP, 0)
        thread = threading.Thread(target=self._serve, args=(answered,), name="hetero-in-place", daemon=True)
        thread.start()
        return thread

    def _serve(self, answered: int) -> None:
        """Until it is told to stop, or a call stays without an answer."""
        is_answering = True
        while is_answering:
            try:
                self._answers.run(answered)
                is_answering = False
            except BaseException as error:
                self._failure = self._failure or error
                is_answering = self._region.read(Word.ANSWERS) > answered
                answered = self._region.read(Word.ANSWERS)
        if not self._is_closing:
            self._failure = self._failure or DeviceError(
                "the thread that computes experts on the CPU has ended; the next request starts another"
            )


def _say_lost(trials: Trials[float]) -> None:
    log.warning(
        "misses are all loaded from now on: a step takes %.2f ms so, and %.2f ms at best with some of them "
        "computed on the CPU; misses.handler: load saves its memory, and cpu.threads or cpu.isa may make it "
        "faster",
        1e3 * trials.plain_s,
        1e3 * trials.helped_s,
    )
