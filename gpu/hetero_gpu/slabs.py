"""Device room for expert records."""

from __future__ import annotations

import torch


class SlabPool:
    """`num_slabs` equal slabs at one base address.

        base  |slab 0        |slab 1        |slab 2        | ...
               <record_bytes>

    One allocation for the life of the engine: nothing is allocated while tokens are made, and a kernel can
    address any expert as base + slab * record_bytes.
    """

    def __init__(self, num_slabs: int, record_bytes: int, device: torch.device) -> None:
        self.num_slabs, self.record_bytes = num_slabs, record_bytes
        self.memory = torch.empty((num_slabs, record_bytes), dtype=torch.uint8, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return self.num_slabs * self.record_bytes

    def slab(self, slot: int) -> torch.Tensor:
        """Bytes of one slab. uint8 `[record_bytes]`, a view."""
        return self.memory[slot]
