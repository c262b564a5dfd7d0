"""A training step as one CUDA graph: 48 narrow layers are ten thousand small kernels, too many to launch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Step = Callable[[Tensor], Tensor]
_WARM_UPS = 3


class CapturedStep:
    """`step`, recorded for windows of one shape. Everything else it reads must stay where it is in memory.

    Memory of the graph's tensors is the graph's own until this object goes.
    """

    def __init__(self, step: Step, windows: Tensor) -> None:
        """Run `step` three times on `windows` (CUDA, int64), then record it; each run is a true step."""
        self._windows = windows.clone()
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(_WARM_UPS):
                step(self._windows)
        torch.cuda.current_stream().wait_stream(beside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._result = step(self._windows)

    def __call__(self, windows: Tensor) -> Tensor:
        """The same step on other windows; the result is overwritten by the next one."""
        self._windows.copy_(windows)
        self._graph.replay()
        return self._result
