"""The prefetch worker: one thread that turns tasks of the captured graph into copies.

It owns nothing but its end of the rings. The device never waits for it: a worker that is slow or dead costs
hits, not progress, and its first failure is raised at the next `raise_if_failed`.
"""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import torch

from hetero_gpu.control.copy_engine import CopyEngine, sleep_address
from hetero_gpu.control.copy_loop import BAD_TASK, STUCK_COPY, Wiring, compile_loop, make_room, run_loop
from hetero_gpu.control.region import ControlRegion, Word
from hetero_gpu.slabs import SlabPool

PIECE_BYTES = 1 << 20
"""20 us of a link of 54 GB/s."""
_JOIN_S = 15.0
"""More than the loop itself waits for its last copies."""
_POLL_S = 1e-4


class PrefetchWorker:
    """Serves the task ring of `region` from its construction to `close`.

    `bank`: all records in the order of their keys, host uint8 `[keys, stored bytes]`; registered with CUDA
    for CUDA's engine. `staging`: for packed records, device uint8 `[buffers, stored bytes]`, more buffers
    than the engine has events. `piece_bytes`: a record crosses the link in pieces of that size, between which
    what the device gathers itself goes first. `cpus`: processors that the thread, which spins, keeps to;
    none: any.
    """

    def __init__(
        self,
        region: ControlRegion,
        *,
        bank: torch.Tensor,
        slabs: SlabPool,
        engine: CopyEngine,
        staging: torch.Tensor | None = None,
        piece_bytes: int = PIECE_BYTES,
        cpus: frozenset[int] = frozenset(),
    ) -> None:
        """Compile the loop (once a process, a few seconds) and start the thread."""
        stored_bytes = bank.shape[1]
        if staging is None and stored_bytes != slabs.record_bytes:
            raise ValueError(
                f"records of {stored_bytes} bytes for slabs of {slabs.record_bytes}: packed ones need staging"
            )
        if staging is not None and (staging.shape[1] != stored_bytes or len(staging) <= len(engine.events)):
            raise ValueError(
                f"staging {tuple(staging.shape)} for records of {stored_bytes} bytes and "
                f"{len(engine.events)} pieces under way"
            )
        self._region, self._engine, self._cpus = region, engine, cpus
        self._memory = (bank, slabs, staging)  # keeps the addresses below valid
        self._num_buffers = 0 if staging is None else len(staging)
        self._code = 0
        self._failure: BaseException | None = None
        self._is_closed = False
        head = region.host_address
        self._wiring = Wiring(
            region=head,
            tasks=head + region.tasks_address - region.device_address,
            landings=head + region.landings_address - region.device_address,
            ring_size=region.ring_size,
            bank=bank.data_ptr(),
            stored_bytes=stored_bytes,
            piece_bytes=piece_bytes,
            target=(slabs.memory if staging is None else staging).data_ptr(),
            target_bytes=slabs.record_bytes if staging is None else stored_bytes,
            num_buffers=self._num_buffers,
            num_slots=slabs.num_slabs,
            num_keys=len(bank),
            stream=engine.stream,
            copy=engine.copy,
            record=engine.record,
            query=engine.query,
            sleep=sleep_address(),
        )
        region.write(Word.STOP, 0)
        compile_loop()
        self._thread = threading.Thread(target=self._run, name="hetero-prefetch", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether tasks are still being served."""
        return self._thread.is_alive()

    def raise_if_failed(self) -> None:
        """Raise RuntimeError if the worker has ended by itself; its first failure is the cause."""
        if self._thread.is_alive() or self._is_closed:
            return
        raise RuntimeError(f"the prefetch worker ended: {self._reason()}") from self._failure

    def drain(self, timeout_s: float = 10.0) -> None:
        """Wait until every task emitted so far has its landing, which the next `land` takes note of.

        The device emits no more meanwhile. Raises RuntimeError when the worker has ended, and TimeoutError.
        """
        end = time.monotonic() + timeout_s
        while self._region.read(Word.LANDING_TAIL) < self._region.read(Word.TASK_TAIL):
            self.raise_if_failed()
            if time.monotonic() > end:
                raise TimeoutError(
                    f"after {timeout_s} s {self._region.read(Word.LANDING_TAIL)} of "
                    f"{self._region.read(Word.TASK_TAIL)} prefetch tasks are done"
                )
            time.sleep(_POLL_S)

    def close(self) -> None:
        """End the thread; no copy is under way afterwards. Safe to call twice.

        Raises TimeoutError when a copy does not end: then bank and slabs must not be freed.
        """
        self._region.write(Word.STOP, 1)
        self._thread.join(_JOIN_S)
        if self._thread.is_alive() or self._code == STUCK_COPY:
            raise TimeoutError(f"a prefetch copy is still under way after {_JOIN_S} s")
        self._is_closed = True

    def _run(self) -> None:
        events = np.array(self._engine.events, dtype=np.int64)
        try:
            if self._cpus and hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, self._cpus)  # of this thread only
            self._code = int(run_loop(self._wiring, events, *make_room(events.size, self._num_buffers)))
            self._region.write(Word.FAILURE, self._code)
        except BaseException as error:  # kept, and raised at the next step
            self._failure = error

    def _reason(self) -> str:
        if self._failure is not None:
            return str(self._failure)
        if self._code == BAD_TASK:
            return (
                "a task in the ring was not written by the device (a tag that fell, or a slot out of range)"
            )
        if self._code == STUCK_COPY:
            return "a copy did not end"
        return f"the copy engine returned error {self._code}" if self._code else "it was told to stop"
