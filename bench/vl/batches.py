"""Batches out of a pool of pictures that still grows, everything on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bench.vl.pool import CHUNK, ROWS_PER_PICTURE, PicturePool


class Batch(NamedTuple):
    """Pictures, what lies under their visual tokens, and one row of questions each."""

    pictures: Tensor  # [batch, 192, 192, 3] uint8
    cells: Tensor  # [batch, 144, 3] int64
    rows: Tensor  # [batch, 4, ROW_LENGTH] int64


class DeviceBatches:
    """A copy of `pool` on `device`, chunk by chunk as they become ready."""

    def __init__(self, pool: PicturePool, device: torch.device, *, seed: int) -> None:
        self._pool, self._chunks = pool, 0
        self._parts = [
            torch.empty(part.shape, dtype=torch.from_numpy(part[:1]).dtype, device=device)
            for part in (pool.drawn.pixels, pool.drawn.cells, pool.drawn.rows)
        ]
        self._generator = torch.Generator(device).manual_seed(seed)

    @property
    def num_pictures(self) -> int:
        """Pictures that batches are drawn from now."""
        return self._chunks * CHUNK

    def fetch(self, most: int) -> None:
        """Copy chunks that have become ready, `most` of them at most."""
        ready = min(self._pool.num_ready, self._chunks + most)
        if ready == self._chunks:
            return
        new = slice(self._chunks * CHUNK, ready * CHUNK)
        for part, drawn in zip(self._parts, self._pool.drawn[:3], strict=True):
            part[new].copy_(torch.from_numpy(drawn[new]))
        self._chunks = ready

    def draw(self, batch: int) -> Batch:
        """Any pictures copied so far, each with one of its rows."""
        pixels, cells, rows = self._parts
        chosen = self._choose(self.num_pictures, batch)
        row = rows[chosen, self._choose(ROWS_PER_PICTURE, batch)]
        return Batch(pixels[chosen], cells[chosen].long(), row.long())

    def _choose(self, below: int, count: int) -> Tensor:
        device = self._parts[0].device
        return torch.randint(below, (count,), generator=self._generator, device=device)
