"""A text whose predictor speaks at every layer, prompts included: VisMMOE's rolling prediction (§3.3.3).

hear      the router's input, averaged over the pass's tokens; what was dropped before is not among them
decided   its experts are known: the prediction starts on the device, ahead of the experts' own work
speak     it has arrived on the host: the order of loading in a prompt, the hot set in a step
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from hetero_runtime.foresight.text import Said, Text
from hetero_scheduler.predict.lookahead_features import Shares, shares_of
from hetero_scheduler.predict.lookahead_mlp import LookaheadMlp


class RollingText(Text):
    """One text, by a lookahead predictor of its own."""

    orders_prompts = True

    def __init__(self, predictor: LookaheadMlp) -> None:
        super().__init__()
        self._predictor = predictor
        self.sees = predictor.shape.visual_size > 0
        self._step = -1
        self._pooled: torch.Tensor | None = None
        self._has_spoken = True

    def begin(self) -> None:
        self._predictor.reset()
        self._step = -1
        self.is_new = False

    def begin_pass(self) -> None:
        self._step += 1
        self._pooled, self._has_spoken = None, True

    def see(self, visual: torch.Tensor) -> None:
        self._predictor.see(visual)

    def hear(self, layer: int, logits: torch.Tensor, hidden: torch.Tensor) -> None:
        self._pooled = hidden[0] if len(hidden) == 1 else hidden.float().mean(dim=0)

    def decided(self, layer: int, chosen: npt.NDArray[np.int64]) -> None:
        self.shared(layer, shares_of(chosen, self._predictor.shape.num_experts))

    def shared(self, layer: int, share: Shares, *, speaks: bool = True) -> None:
        """As `decided`, where it is known of each expert which share of the tokens chose it,
        `[num_experts]`. Unless it `speaks`, no prediction starts."""
        assert self._pooled is not None, f"the router of layer {layer} was not heard"
        if speaks:
            self._predictor.observe_share(self._step, layer, share, self._pooled)
        else:
            self._predictor.keep_share(self._step, layer, share)
        self._pooled, self._has_spoken = None, not speaks

    def speak(self, layer: int) -> list[Said]:
        if self._has_spoken:
            return []
        self._has_spoken = True
        forecast = self._predictor.forecast()
        return [] if forecast is None else [Said(forecast, runs_now=True)]
