"""Texts whose predictor speaks at every layer, in a captured engine: read by the host, stepped by the device.

    a prompt    routers heard ─ experts of l known ─► the prediction starts ─► forecast: what comes next
    after it    what the host's predictor remembers ─► the row's of the device, which goes on
    more of it  and back: the host goes on from what the device has heard

A prediction is made at every STRIDE-th layer, and awaited only where it matters: the grouped orchestrator
asks when something to come is absent, once all loads and waves of the layer are submitted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
import numpy.typing as npt
import torch

from hetero_gpu.predict.lookahead import DeviceLookahead
from hetero_runtime.foresight.rolling import RollingText
from hetero_runtime.foresight.sight import Sight
from hetero_runtime.hf.visual import Images
from hetero_runtime.orchestrator.ahead import PredictionStats
from hetero_scheduler.predict import Forecast
from hetero_scheduler.predict.lookahead_features import STRIDE
from hetero_scheduler.predict.lookahead_mlp import LookaheadMlp


class RollingPrompts:
    """One predictor for each row. `device`: what foresees while rows step. Also the `ForeseesPrompts` of the
    orchestrator that runs prompts."""

    def __init__(self, predictors: Sequence[LookaheadMlp], *, device: DeviceLookahead) -> None:
        self._predictors, self._device = predictors, device
        self._sight: Sight | None = None
        self._texts = [RollingText(predictor) for predictor in predictors]
        self._text: RollingText | None = None
        self._stats = PredictionStats()

    @property
    def sees(self) -> bool:
        """Whether forecasts depend on what images look like."""
        return self._texts[0].sees

    def look_through(self, sight: Sight) -> None:
        """From now on texts are told by `sight` what their images look like."""
        self._sight = sight

    # ---- texts

    @contextmanager
    def read(
        self, row: int, ids: torch.Tensor, *, is_first: bool, images: Images | None = None
    ) -> Iterator[None]:
        """As in the contract. Waits for the device at its end. Of a pass that is given up the device learns
        nothing."""
        text, predictor = self._texts[row], self._predictors[row]
        if is_first:
            text.begin()
        else:
            predictor.remember(self._device.history(row))
        text.begin_pass()
        looking = self._sight.during(ids, images) if images and self._sight is not None else nullcontext()
        self._text = text
        try:
            with looking:
                yield
        finally:
            self._text = None
        self._device.load(row, predictor.remembered())

    def end(self, row: int) -> None:
        """What is remembered of `row` stays until the next text begins there."""

    # ---- layers of a prompt

    def hear(self, layer: int, logits: torch.Tensor, hidden: torch.Tensor) -> None:
        """As in `listen_to_routers`; rows that step are heard on the device."""
        if self._text is None:
            return
        visual = None if self._sight is None else self._sight.news()
        if visual is not None:
            self._text.see(visual)
        self._text.hear(layer, logits, hidden)

    def decided(self, layer: int, tokens_per_expert: npt.NDArray[np.int64]) -> None:
        if self._text is None:
            return
        began = time.perf_counter()
        num_tokens = tokens_per_expert.sum() / self._device.shape.top_k
        share, speaks = (tokens_per_expert / num_tokens).astype(np.float32), layer % STRIDE == 0
        self._text.shared(layer, share, speaks=speaks)
        self._stats += PredictionStats(int(speaks), time.perf_counter() - began)

    def forecast(self, layer: int) -> Forecast | None:
        if self._text is None:
            return None
        began = time.perf_counter()
        said = self._text.speak(layer)
        self._stats += PredictionStats(0, time.perf_counter() - began)
        return said[0].forecast if said else None

    def stats(self) -> PredictionStats:
        return self._stats
