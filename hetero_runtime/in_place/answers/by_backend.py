"""Answers by whatever a backend's `submit` and `wait` do, with Python around them."""

from __future__ import annotations

import numpy as np

from hetero_gpu.control.copy_engine import sleep_address
from hetero_gpu.in_place import Mailbox
from hetero_gpu.in_place.listen import answer, await_call, compile_listening
from hetero_runtime.in_place.answers.base import Answers, CallLine
from hetero_runtime.in_place.base import InPlaceExperts, Work
from hetero_runtime.in_place.misses import InPlaceStats


class BackendAnswers(Answers):
    """Construction compiles the listening: a second."""

    def __init__(self, experts: InPlaceExperts, line: CallLine) -> None:
        self._experts, self._line = experts, line
        self._stats = InPlaceStats()
        compile_listening()

    def run(self, answered: int) -> None:
        mailbox, address = self._line.mailbox, self._line.region.host_address
        while (number := await_call(address, answered, sleep_address())) >= 0:
            try:
                self._compute(work_of(mailbox))
            except BaseException:
                mailbox.total[:] = 0.0
                raise
            finally:
                answer(address, number)
            answered = number

    def stats(self) -> InPlaceStats:
        return self._stats

    def _compute(self, work: Work) -> None:
        self._experts.submit(work)
        done = self._experts.wait()
        self._line.mailbox.total[: len(done.total)] = done.total
        self._stats += InPlaceStats(len(work.experts), done.seconds)


def work_of(mailbox: Mailbox) -> Work:
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
