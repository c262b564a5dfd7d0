"""Small work beside the compute stream, which goes on with large work meanwhile.

    compute    ─ gather ─┬─ experts ─ attention ─ … ─┬─ ensure ─
    beside               └─ predictor ─ choice ──────┘
                      `begin`                      `join`

Both may be captured: what is beside becomes a branch of the graph. On the CPU there is one order of things,
and the work is done where it is submitted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Beside:
    """A stream of its own on `device`, if that has streams. `begin` and `join` take turns."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._is_begun = False

    @contextmanager
    def begin(self) -> Iterator[None]:
        """What is submitted inside runs behind all that was submitted before, beside what comes until `join`,
        which may not write what it reads, or read what it writes."""
        assert not self._is_begun, "what was begun before is not joined"
        if self._stream is None:
            yield
            return
        self._is_begun = True
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """What is submitted from now on runs behind what is beside, if anything is."""
        if self._stream is not None and self._is_begun:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._is_begun = False


def used_here(*tensors: torch.Tensor) -> None:
    """Keep their memory from being used anew before the current stream has done what was submitted to it,
    even if they were made on another stream and nobody holds them any more."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
