"""The host bank of a device that computes in it: the one place where experts lie."""

from __future__ import annotations

import torch

from hetero_gpu.host_memory import Registration
from hetero_gpu.mapped import MappedMemory
from hetero_runtime.no_room import no_room_for


class MappedBank:
    """`num_bytes` of mapped memory. `bytes` is what loading fills, `device_bytes` what kernels read: both
    uint8 `[num_bytes]`, and the same."""

    def __init__(self, num_bytes: int) -> None:
        """Raises DeviceError when the driver refuses that much."""
        what, fix = f"{num_bytes / 1e9:.1f} GB of experts", "free memory, or write memory.backing: direct"
        with no_room_for(what, torch.device("cpu"), fix=fix):
            self._memory = MappedMemory(num_bytes)
        self.num_bytes = num_bytes
        self.registration = Registration("registered", "the driver allocated it")

    @property
    def bytes(self) -> torch.Tensor:
        """See the class."""
        return self._memory.host

    @property
    def device_bytes(self) -> torch.Tensor:
        """See the class."""
        return self._memory.device

    def register(self, *, chunk_bytes: int) -> Registration:
        """Nothing is left to do."""
        return self.registration

    def close(self) -> None:
        """Give the memory back; safe to call twice. No view is used again."""
        self._memory.close()
