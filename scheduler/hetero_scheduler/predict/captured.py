"""A training step as one CUDA graph: a small model's step is a thousand kernels, too many to launch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Step = Callable[..., Tensor]
_WARM_UPS = 3


class CapturedStep:
    """`step`, recorded for inputs of one shape. Everything else it reads must stay where it is in memory.

    Memory of the graph's tensors is the graph's own until this object goes.
    """

    def __init__(self, step: Step, *inputs: Tensor) -> None:
        """Run `step` three times on `inputs` (CUDA), then record it; each run is a true step."""
        self._inputs = [each.clone() for each in inputs]
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(_WARM_UPS):
                step(*self._inputs)
        torch.cuda.current_stream().wait_stream(beside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._result = step(*self._inputs)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The same step on other inputs; the result is overwritten by the next one."""
        for mine, given in zip(self._inputs, inputs, strict=True):
            mine.copy_(given, non_blocking=True)
        self._graph.replay()
        return self._result


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The learning rate of all groups; where it is a tensor, for captured steps as well."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
