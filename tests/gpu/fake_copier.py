"""A copier whose copies arrive when the test says so."""

from __future__ import annotations

import torch

from hetero_gpu import Arrived, Fence, LinkCopier, Point, Transfer


class FakeTransfer(Transfer):
    def __init__(self, owner: FakeCopier, source: torch.Tensor, slab: torch.Tensor) -> None:
        self._owner, self._source, self._slab = owner, source, slab
        self.has_arrived = False

    def arrive(self) -> None:
        if not self.has_arrived:
            self._slab.copy_(self._source)
            self.has_arrived = True

    def is_done(self) -> bool:
        return self.has_arrived

    def wait(self) -> None:
        self._owner.arrive_through(self)


class FakeCopier(LinkCopier):
    """Copies arrive in order: by `arrive_next`, or because something waits for them."""

    def __init__(self) -> None:
        self.pending: list[FakeTransfer] = []
        self.num_submitted = 0
        self.num_fences = 0
        self.starts_after: list[Fence | None] = []
        """The fence of each copy; fences are numbered from 1."""
        self.fail_next: Exception | None = None

    def submit(self, source: torch.Tensor, slab: torch.Tensor, *, after: Fence | None) -> Transfer:
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        slab.fill_(0xEE)  # what is there is lost from now on
        self.num_submitted += 1
        self.starts_after.append(after)
        self.pending.append(FakeTransfer(self, source, slab))
        return self.pending[-1]

    def bring_back(self, slab: torch.Tensor, into: torch.Tensor, *, copied: Transfer) -> Point:
        copied.wait()
        into.copy_(slab)
        return Arrived()

    def arrive_next(self) -> None:
        self.pending.pop(0).arrive()

    def arrive_through(self, transfer: FakeTransfer) -> None:
        while not transfer.has_arrived:
            self.arrive_next()

    def fence(self) -> Fence | None:
        self.num_fences += 1
        return self.num_fences

    def stall_s(self) -> float:
        return 0.0

    def synchronize(self) -> None:
        while self.pending:
            self.arrive_next()


class FailingCopier(FakeCopier):
    """Fails every copy after the first `num_good`."""

    def __init__(self, num_good: int) -> None:
        super().__init__()
        self.num_good = num_good

    def submit(self, *args: object, **options: object) -> object:  # type: ignore[override]
        if self.num_submitted >= self.num_good:
            self.fail_next = OSError("the link is down")
        return super().submit(*args, **options)  # type: ignore[arg-type]
