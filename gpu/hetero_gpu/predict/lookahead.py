"""VisMMOE's lookahead predictor inside the captured step: all rows at once, at every layer (VisMMOE §3.3).

    history [rows, L + W, E]   what each row's tokens chose, fading; past the last layer zeros
    seen [rows, S, M]          what its images add at each layer, told when its prompt was read

    hear(l)      history of l moves on
    foresee(l)   [history of l .. l + W ; hidden at l] ─► three products ─► shares

Word for word what `hetero_scheduler.predict`'s LookaheadMlp says of one text. Device work alone, by torch: a
layer's products are small, and rows of a step are few.
"""

from __future__ import annotations

import torch

from hetero_scheduler.predict.lookahead_features import FADING, LookaheadShape, Shares
from hetero_scheduler.predict.lookahead_mlp import Remembered
from hetero_scheduler.predict.lookahead_model import LookaheadWeights


class DeviceLookahead:
    """See the module docstring. `active`: bool `[rows]` on the device of `weights`, the rows that step."""

    def __init__(self, weights: LookaheadWeights, shape: LookaheadShape, *, active: torch.Tensor) -> None:
        self.shape = shape
        self._weights, self._active = weights, active
        rows, device = len(active), active.device
        self._history = torch.zeros(
            rows, shape.num_layers + shape.window, shape.num_experts, dtype=torch.float32, device=device
        )
        self._seen = weights.inner_bias.repeat(rows, 1, 1)
        self._experts = torch.arange(shape.num_experts, device=device)
        self._undecayed = (1.0 / torch.from_numpy(shape.decays()).to(device))[:, None]

    # ---- captured

    def hear(self, layer: int, chosen: torch.Tensor) -> None:
        """`layer` routes the first rows. `chosen` `[n, top_k]`: their experts, -1 in rows that do not
        step."""
        is_chosen = (chosen[:, :, None] == self._experts).any(dim=1)
        is_active = self._active[: len(chosen), None]
        self._history[: len(chosen), layer].lerp_(is_chosen.float(), FADING * is_active)

    def foresee(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """After `layer` was heard, which is not the last one. `hidden` `[n, hidden_size]`: what its router
        was asked.

        Returns what the next W layers will want, as the host's forecast says it: probabilities float32
        `[layers, experts]`, the most that any row says.
        """
        num_coming = min(self.shape.window, self.shape.num_layers - 1 - layer)
        near = self._history[: len(hidden), layer : layer + self.shape.window + 1].flatten(1)
        dtype = self._weights.inner.dtype
        scores = self._scores(layer, torch.cat([near.to(dtype), hidden.to(dtype)], dim=1), num_coming)
        active = scores.view(len(hidden), num_coming, -1) * self._undecayed[:num_coming]
        said = active / active.sum(dim=2, keepdim=True).clamp_min(self.shape.top_k)
        if len(said) == 1:  # a single row is always active in its own step
            return said[0]
        return (said * self._active[: len(said), None, None]).amax(dim=0)

    def _scores(self, layer: int, features: torch.Tensor, num_coming: int) -> torch.Tensor:
        """γ^(d-1) times the shares that are expected of the next layers. float32 `[n, num_coming * E]`"""
        weights, num_out = self._weights, num_coming * self.shape.num_experts
        z = torch.addmm(self._seen[: len(features), layer], features, weights.inner[layer]).relu_()
        z = torch.addmm(weights.middle_bias[layer], z, weights.middle[layer]).relu_()
        y = torch.addmm(weights.outer_bias[layer, :num_out], z, weights.outer[layer, :, :num_out])
        return torch.sigmoid(y.float())

    # ---- by the host, between steps

    def load(self, row: int, text: Remembered) -> None:
        """Let `row` go on from what a host predictor remembers."""
        history = torch.from_numpy(text.history)
        self._history[row, : self.shape.num_layers].copy_(history)
        self._seen[row].copy_(text.seen)

    def history(self, row: int) -> Shares:
        """What `row` has chosen, for a host predictor to go on from. Waits for the device.
        `[num_layers, num_experts]`"""
        history: Shares = self._history[row, : self.shape.num_layers].cpu().numpy().copy()
        return history
