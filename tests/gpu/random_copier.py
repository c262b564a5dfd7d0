"""A link of any speed: whenever somebody looks, some of the copies under way may have arrived."""

from __future__ import annotations

import random

import torch

from hetero_gpu import Fence, Transfer
from tests.gpu.fake_copier import FakeCopier, FakeTransfer


class RandomCopier(FakeCopier):
    """`patience`: how probable it is that a copy that is looked at has not arrived yet."""

    def __init__(self, patience: float, *, seed: int) -> None:
        super().__init__()
        self._patience, self._random = patience, random.Random(seed)
        self.most_under_way = 0

    def submit(self, source: torch.Tensor, slab: torch.Tensor, *, after: Fence | None) -> Transfer:
        super().submit(source, slab, after=after)
        self.pending[-1] = _Hesitant(self, source, slab)
        self.most_under_way = max(self.most_under_way, len(self.pending))
        return self.pending[-1]

    def look(self) -> None:
        """Time goes on by itself."""
        while self.pending and self._random.random() > self._patience:
            self.arrive_next()


class _Hesitant(FakeTransfer):
    def __init__(self, owner: RandomCopier, source: torch.Tensor, slab: torch.Tensor) -> None:
        super().__init__(owner, source, slab)
        self._link = owner

    def is_done(self) -> bool:
        self._link.look()
        return self.has_arrived
