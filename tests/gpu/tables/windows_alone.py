"""A layer begins for whom windows foresee, where a test needs no `ensure`, which does it."""

from __future__ import annotations

import torch

from hetero_gpu.tables import Windows
from hetero_gpu.tables.windows import RUN


def begin_layer(windows: Windows, layer: int, active: torch.Tensor, chosen: torch.Tensor) -> None:
    """`active`: bool `[stepping rows]`, those that pass `layer`; `chosen`: integers `[stepping rows, top_k]`,
    contiguous, the experts that they use, below 0 for none."""
    windows._launch(range(layer, layer + 1), active, chosen, change=RUN)
