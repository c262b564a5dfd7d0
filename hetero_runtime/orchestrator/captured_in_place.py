"""Misses that the CPU computes inside the captured step: the device rings, a host thread answers.

    layer l     divide ─ call ─ ensure ─ gather ─ experts ─ add the answer
                          │                          ▲
    host thread    listens└─ its backend computes ───┘     while the device loads and computes its own share

How many of a layer's misses go to the CPU is a table of the host, made anew from the policy's costs between
passes; which ones, the device decides. The device waits within bounds: a thread that died or hangs makes an
error of the pass, and no hung device. What a backend raised is raised after the pass. A thread that died is
told of once, with the first thing that went wrong, and the next pass has another.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import torch

from hetero_gpu.control import ControlRegion, Word
from hetero_gpu.control.copy_engine import sleep_address
from hetero_gpu.control.fault import TableError
from hetero_gpu.in_place import Division, Mailbox, add_answer, answer, await_call, call, divide
from hetero_gpu.in_place.divide import MOST_LOOKS
from hetero_gpu.in_place.listen import compile_listening
from hetero_gpu.tables import DeviceTables
from hetero_runtime.errors import DeviceError
from hetero_runtime.in_place import InPlaceExperts, InPlaceStats, Work
from hetero_scheduler.misses import LayerDemand, MissPolicy

_JOIN_S = 15.0
_POLL_S = 1e-4
CALLS_BETWEEN = 256
"""Calls after which the costs may say something new: some five tokens of a big model."""


class CapturedInPlace:
    """See the module docstring. `region`: what `tables` are attached to; `hidden`: H. `top_k`: of a row.

    Construction compiles the listening (a second) and starts the thread. `experts` is closed with this.
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
        self._experts, self._policy, self._tables, self._region = experts, policy, tables, region
        self._top_k = top_k
        self._mailbox = Mailbox(tables.device, rows=tables.max_pairs // top_k, hidden=hidden, top_k=top_k)
        self._division = Division(tables)
        self._stats, self._num_since = InPlaceStats(), 0
        self._numbers: list[int] = []
        self._failure: BaseException | None = None
        self._is_closing = False
        compile_listening()
        self._thread = self._start()
        self.begin_pass()

    # ---- captured, for each layer

    def begin_layer(
        self, layer: int, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Hand the CPU its share. Returns what the device is to bring, int32 `[T, K]`."""
        kept = divide(self._tables, layer, top_k_index, top_k_weights, division=self._division)
        call(
            layer,
            hidden,
            top_k_weights,
            division=self._division,
            mailbox=self._mailbox,
            region=self._region,
        )
        return kept

    def finish_layer(self, out: torch.Tensor) -> None:
        """Add the CPU's share to `out` `[T, H]`."""
        add_answer(
            out,
            division=self._division,
            mailbox=self._mailbox,
            region=self._region,
            error_address=self._tables.error_address,
        )

    # ---- by the host, between passes

    def begin_pass(self) -> None:
        """Put another thread in the place of one that died, which waits for the device; make the table anew
        where enough calls were answered since, which waits for nothing."""
        if not self._thread.is_alive():
            self.finish()
        if self._numbers and self._num_since < CALLS_BETWEEN:
            return
        self._num_since = 0
        numbers = [self._number(misses) for misses in range(self._tables.max_pairs + 1)]
        if numbers == self._numbers:
            return
        self._numbers = numbers
        self._division.number_of.copy_(torch.tensor(numbers, dtype=torch.int32))
        if not any(numbers):
            self._policy.give_up()

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
        self._division.patience.fill_(MOST_LOOKS)
        if not self._thread.is_alive():
            self._region.forget(TableError.NO_ANSWER)  # its end is told, or will be, in place of that
            self._thread = self._start()

    def stats(self) -> InPlaceStats:
        """Since the engine began, or since `forget_counts`."""
        return self._stats

    def forget_counts(self) -> None:
        """Start from zero."""
        self._stats = InPlaceStats()

    def close(self) -> None:
        """End the thread and the backend; no step may follow."""
        self._is_closing = True
        self._region.write(Word.STOP, 1)
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            raise TimeoutError(f"after {_JOIN_S:.0f} s the CPU still computes experts")
        self._experts.close()

    def _number(self, num_misses: int) -> int:
        """How many of so many misses are computed in place; as many experts as a row has are needed."""
        num_hits = max(0, self._top_k - num_misses)
        demand = LayerDemand([1] * num_hits, [1] * num_misses, range(num_misses), num_empty=0)
        return len(self._policy.plan_beside(demand))

    # ---- the thread

    def _start(self) -> threading.Thread:
        """A thread that answers the calls to come; the device has nothing to do."""
        self._answered = self._region.read(Word.CALLS)
        self._region.write(Word.ANSWERS, self._answered)
        self._region.write(Word.STOP, 0)
        thread = threading.Thread(target=self._serve, name="hetero-in-place", daemon=True)
        thread.start()
        return thread

    def _serve(self) -> None:
        try:
            self._answer_calls()
        except BaseException as error:
            self._failure = self._failure or error
        if not self._is_closing:
            self._failure = self._failure or DeviceError(
                "the thread that computes experts on the CPU has ended; the next request starts another"
            )

    def _answer_calls(self) -> None:
        """Until it is told to stop."""
        region, sleep = self._region.host_address, sleep_address()
        while True:
            number = await_call(region, self._answered, sleep)
            if number < 0:
                return
            try:
                self._compute()
            except BaseException as error:
                self._mailbox.total[:] = 0.0
                self._failure = self._failure or error
            self._answered = number
            answer(region, number)

    def _compute(self) -> None:
        began = time.perf_counter()
        work = _work_of(self._mailbox)
        self._experts.submit(work)
        done = self._experts.wait()
        self._mailbox.total[: len(done.total)] = done.total
        self._stats += InPlaceStats(len(work.experts), done.seconds)
        self._num_since += 1
        self._policy.observe_in_place(np.diff(work.bounds).tolist(), done.seconds)
        self._policy.observe_call(time.perf_counter() - began - done.seconds)


def _work_of(mailbox: Mailbox) -> Work:
    """The call that lies in the mailbox; what the backend reads of it stays as it is until it is answered."""
    layer, num_rows = mailbox.head.tolist()
    flat = mailbox.experts[:num_rows].reshape(-1)
    pairs = np.flatnonzero(flat >= 0)
    order = pairs[np.argsort(flat[pairs], kind="stable")]
    experts, first = np.unique(flat[order], return_index=True)
    return Work(
        layer=layer,
        hidden=mailbox.hidden[:num_rows],
        experts=experts.astype(np.int64),
        bounds=np.append(first, len(order)),
        tokens=order // mailbox.top_k,
        weights=mailbox.weights[:num_rows].reshape(-1)[order],
    )
