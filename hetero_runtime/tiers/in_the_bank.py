"""Slabs that are the host bank: the device computes experts where they were loaded."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hetero_gpu import Arrived, Copier, Fence, SlabPool, Transfer


class LyingRecord(NamedTuple):
    """A record that is in the slab with its number, and moves nowhere."""

    row: int
    nbytes: int = 0


class LyingCopier(Copier[LyingRecord]):
    """Brings records to where they are."""

    def __init__(self, slabs: SlabPool) -> None:
        self._slabs = slabs

    def submit(self, source: LyingRecord, slab: torch.Tensor, *, after: Fence | None) -> Transfer:
        lies_at = self._slabs.landing(source.row).data_ptr()
        assert slab.data_ptr() == lies_at, f"record {source.row} cannot leave its slab"
        return Arrived()

    def fence(self) -> Fence | None:
        return None

    def stall_s(self) -> float:
        return 0.0

    def synchronize(self) -> None:
        return
