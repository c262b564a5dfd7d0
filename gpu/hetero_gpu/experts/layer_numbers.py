"""The few numbers about a layer that device and host tell each other while a prompt runs.

    device    bounds of the sort ──copy──(asked)──── wave ── wave ──── …
    host      …                     tokens_per_expert: waits for (asked), once a layer
              which experts of the next wave lie in which slabs ──copy──► device

Nothing else makes the host wait: copies to the device leave from pinned memory, which is written again only
after a point that the host has seen the device pass.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

_ALIGN = 4
"""Numbers of one load of a thread: what the kernels get starts at multiples of it."""


class LayerNumbers:
    """For layers of `num_experts`, on the current stream of `device`. One layer at a time."""

    def __init__(self, num_experts: int, device: torch.device) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"
        self._bounds = torch.zeros(num_experts + 1, dtype=torch.int32, pin_memory=self._is_cuda)
        # at most, a layer sends all its experts in one wave, then all of them in waves of one
        self._room = 2 * num_experts * 2 * _ALIGN
        self._sent = [torch.zeros(self._room, dtype=torch.int32, pin_memory=self._is_cuda) for _ in range(2)]
        self._half, self._used = 0, 0
        self._asked = torch.cuda.Event() if self._is_cuda else None

    def ask(self, bounds: torch.Tensor) -> None:
        """A layer begins: start to copy `bounds`, int32 `[num_experts + 1]`, to the host."""
        if self._asked is not None:
            self._asked.synchronize()  # of a layer that was given up; else it was waited for already
        # what the other half held was sent before the answer to the last `ask`
        self._half, self._used = 1 - self._half, 0
        self._bounds.copy_(bounds, non_blocking=True)
        if self._asked is not None:
            self._asked.record()

    def tokens_per_expert(self) -> npt.NDArray[np.int64]:
        """The answer to `ask`, `[num_experts]`; the host waits for it."""
        if self._asked is not None:
            self._asked.synchronize()
        return np.diff(self._bounds.numpy()).astype(np.int64)

    def send(
        self, experts: npt.NDArray[np.int64], slots: npt.NDArray[np.int32]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A wave on the device: `experts` and `slots`, `[n]` each, as int32."""
        num = len(experts)
        width = -(-num // _ALIGN) * _ALIGN
        begin, self._used = self._used, self._used + 2 * width
        assert self._used <= self._room, f"waves of one layer need {self._used} of {self._room} numbers"
        pair = self._sent[self._half][begin : self._used]
        host = pair.numpy()
        host[:num], host[width : width + num] = experts, slots
        on_device = pair.to(self._device, non_blocking=True)
        return on_device[:num], on_device[width : width + num]
