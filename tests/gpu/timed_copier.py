"""A link with a clock of its own: copies take their time, in order; time goes on when the test says so."""

from __future__ import annotations

from collections import deque

import torch

from hetero_gpu import Copier, Fence, Transfer


class _Timed(Transfer):
    def __init__(self, owner: TimedCopier, done_s: float, source: torch.Tensor, slab: torch.Tensor) -> None:
        self._owner, self.done_s, self._source, self._slab = owner, done_s, source, slab

    def arrive(self) -> None:
        self._slab.copy_(self._source)

    def is_done(self) -> bool:
        self._owner.deliver()
        return self._owner.now_s >= self.done_s

    def wait(self) -> None:
        self._owner.wait_until(self.done_s)


class TimedCopier(Copier):
    """`copy_s`: what each copy takes. `now_s` moves by `advance` and by waits, which count as stalls."""

    def __init__(self, copy_s: float) -> None:
        self.copy_s, self.now_s, self._free_s, self._stall_s = copy_s, 0.0, 0.0, 0.0
        self._under_way: deque[_Timed] = deque()

    def advance(self, seconds: float) -> None:
        """Something else takes that long."""
        self.now_s += seconds
        self.deliver()

    def wait_until(self, done_s: float) -> None:
        """Stand still until then, if it is still to come."""
        self._stall_s += max(0.0, done_s - self.now_s)
        self.now_s = max(self.now_s, done_s)
        self.deliver()

    def deliver(self) -> None:
        """The bytes of copies that are over are where they belong; before, nobody may read the slab."""
        while self._under_way and self._under_way[0].done_s <= self.now_s:
            self._under_way.popleft().arrive()

    def submit(self, source: torch.Tensor, slab: torch.Tensor, *, after: Fence | None) -> Transfer:
        slab.fill_(0xEE)  # what is there is lost from now on
        self._free_s = max(self.now_s, self._free_s) + self.copy_s
        self._under_way.append(_Timed(self, self._free_s, source, slab))
        return self._under_way[-1]

    def fence(self) -> Fence | None:
        return None

    def stall_s(self) -> float:
        return self._stall_s

    def synchronize(self) -> None:
        self.wait_until(self._free_s)
