"""What a layer hands to the CPU and what it gets back: mapped host memory, one call at a time.

    device writes   layer, rows │ experts [R, K] │ weights [R, K] │ hidden [R, H]     then CALLS, released
    host writes     sum [R, H]                                                        then ANSWERS, released

A pair whose expert the device computes has expert -1. The next call is written when this one is answered.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGN_BYTES = 64
_HEAD = 2
"""Words in front: layer, rows."""


class Mailbox:
    """Room for `rows` rows of `hidden` values with `top_k` experts each. The arrays are the host's view, the
    addresses the device's."""

    def __init__(self, device: torch.device, *, rows: int, hidden: int, top_k: int) -> None:
        """Raises RuntimeError when the memory cannot be mapped for the device."""
        self.rows, self.hidden_size, self.top_k = rows, hidden, top_k
        shapes: list[tuple[tuple[int, ...], type[np.generic]]] = [
            ((_HEAD,), np.int64),
            ((rows, top_k), np.int32),
            ((rows, top_k), np.float32),
            ((rows, hidden), np.float32),
            ((rows, hidden), np.float32),
        ]
        starts, end = [], 0
        for shape, dtype in shapes:
            starts.append(end)
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            end += -(-size // _ALIGN_BYTES) * _ALIGN_BYTES
        self._memory = torch.zeros(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
        base = self._memory.data_ptr()
        if device.type == "cuda":
            from hetero_gpu.mapped import device_address

            base = device_address(base)
        views = [self._view(start, *kind) for start, kind in zip(starts, shapes, strict=True)]
        self.head, self.experts, self.weights, self.hidden, self.total = views
        self.head_at, self.experts_at, self.weights_at, self.hidden_at, self.total_at = (
            base + start for start in starts
        )

    def _view(self, start: int, shape: tuple[int, ...], dtype: type[np.generic]) -> npt.NDArray[Any]:
        end = start + int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self._memory.numpy()[start:end].view(dtype).reshape(shape)
