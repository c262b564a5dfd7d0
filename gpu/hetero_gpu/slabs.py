"""Device room for expert records."""

from __future__ import annotations

import torch

from hetero_gpu.mapped import MappedMemory


class SlabPool:
    """`num_slabs` equal slabs at one base address.

        base  |slab 0        |slab 1        |slab 2        | ...
               <record_bytes>

    One allocation for the life of the engine: nothing is allocated while tokens are made, and a kernel can
    address any expert as base + slab * record_bytes.
    """

    def __init__(
        self,
        num_slabs: int,
        record_bytes: int,
        device: torch.device,
        *,
        memory: torch.Tensor | None = None,
    ) -> None:
        """`memory`: uint8 `[num_slabs, record_bytes]` that somebody else owns; None: memory of its own."""
        self.num_slabs, self.record_bytes = num_slabs, record_bytes
        if memory is None:
            memory = torch.empty((num_slabs, record_bytes), dtype=torch.uint8, device=device)
        assert memory.shape == (num_slabs, record_bytes), f"slabs of {list(memory.shape)} bytes"
        self.memory = memory

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return self.num_slabs * self.record_bytes

    def close(self) -> None:
        """Give the memory back. Nobody reads a slab after that."""
        self.memory = self.memory.new_empty((0, self.record_bytes))

    def slab(self, slot: int) -> torch.Tensor:
        """Bytes of one slab. uint8 `[record_bytes]`, a view."""
        return self.memory[slot]

    def landing(self, slot: int) -> torch.Tensor:
        """The same slab as whoever fills it addresses it. uint8 `[record_bytes]`, a view."""
        return self.slab(slot)


class MappedSlabs(SlabPool):
    """Slabs of mapped memory: the host fills them, the device computes from them, and nothing is copied."""

    def __init__(self, num_slabs: int, record_bytes: int) -> None:
        """Raises what `MappedMemory` raises."""
        self._mapped = MappedMemory(num_slabs * record_bytes)
        memory = self._mapped.device.view(num_slabs, record_bytes)
        super().__init__(num_slabs, record_bytes, memory.device, memory=memory)

    def landing(self, slot: int) -> torch.Tensor:
        begin = slot * self.record_bytes
        return self._mapped.host[begin : begin + self.record_bytes]

    def close(self) -> None:
        super().close()
        self._mapped.close()
