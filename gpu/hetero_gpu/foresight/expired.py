"""The lookahead priority with its expired guard, as scores of the device's tables (VisMMOE §3.4.2).

    expect           forecasts of layers to come
    guard(l)         for the prefetches of l: what lies in the window gives way to none of them
    begin_layer(l)   the runs of l are kept; the window moves on: l + 1 .. l + W, round the end of a step

Score for score what `hetero_scheduler.eviction`'s Lookahead says, but for experts of equal priority. Within a
step every layer but the first is foreseen by the one before it; between steps nothing is, so what is kept is
the whole state. Device work alone.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from hetero_gpu.tables.state import DeviceTables
from hetero_scheduler.eviction.lookahead import REQUIRED, SMOOTHING
from hetero_scheduler.prefetch.top_b import DECAY, SIZE, WINDOW


class ExpiredFirst:
    """See the module docstring. `tables`: whose scores these are."""

    def __init__(self, tables: DeviceTables) -> None:
        num_layers, num_experts = tables.num_layers, tables.num_experts
        self._tables = tables
        self._kept = torch.zeros_like(tables.score)
        self._outlook = torch.zeros_like(tables.score)
        """The newest forecast of each layer to come; of others what is kept."""
        self._experts = torch.arange(num_experts, device=tables.device)
        window = min(WINDOW, num_layers // 2)
        near = np.arange(num_layers)[:, None] + np.arange(1, window + 1)
        self._near = torch.from_numpy(near % num_layers).to(tables.device)  # [L, window], nearest first
        self._decays = torch.from_numpy(DECAY ** np.arange(window)).to(tables.device)[:, None]
        self._size = min(SIZE, window * num_experts)

    # ---- captured

    def begin_layer(self, layer: int, chosen: torch.Tensor) -> None:
        """`layer` runs next, before its `ensure`. `chosen` `[n, top_k]`: of the first layer its experts, -1
        in rows that do not step; what was foreseen of the others is kept instead."""
        kept = self._kept[layer]
        kept.lerp_(self._outlook[layer] if layer else self._shares(chosen), SMOOTHING)
        self._outlook[layer].copy_(kept)
        self._tables.score[layer].copy_(kept)
        if not self._size:
            return
        near = self._near[layer]
        priority = self._outlook.index_select(0, near) * self._decays
        least = priority.flatten().topk(self._size).values[-1]
        score = torch.add(priority, priority >= least, alpha=REQUIRED)
        self._tables.score.index_copy_(0, near, score)

    def expect(self, layers: range, probabilities: torch.Tensor) -> None:
        """A forecast of `layers` in the step that runs. `[len(layers), num_experts]`"""
        self._outlook[layers.start : layers.stop].copy_(probabilities)

    def guard(self, layer: int) -> None:
        """Until the next layer begins, what lies in the window of `layer` may not be evicted."""
        self._tables.score.index_fill_(0, self._near[layer], float("inf"))

    def _shares(self, chosen: torch.Tensor) -> torch.Tensor:
        counts = (chosen[:, :, None] == self._experts).sum(dim=(0, 1))
        shares: torch.Tensor = counts.double() / counts.sum().clamp_min(1)
        return shares

    # ---- by the host, between steps

    def load(self, kept: npt.NDArray[np.float64]) -> None:
        """Go on from what the host's policy has kept, `[num_layers, num_experts]`."""
        self._kept.copy_(torch.from_numpy(kept))
        self._outlook.copy_(self._kept)
        self._tables.score.copy_(self._kept)

    def export(self) -> None:
        """The scores of the tables are what is kept, for the host's policy to go on from."""
        self._tables.score.copy_(self._kept)
