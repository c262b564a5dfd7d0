"""VisMMOE's predictor: at every MoE layer it says which experts the next W layers will want (§3.3).

One pass, a prompt or a token:

    see(visual)                      once, where the text has images
    observe_tokens(layer, …)         the layer has routed: its prediction starts, on the device of the weights
    forecast()                       what it said, once the host wants to know
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hetero_scheduler.predict.base import Forecast, Predictor
from hetero_scheduler.predict.lookahead_features import LookaheadShape, Shares, faded, shares_of
from hetero_scheduler.predict.lookahead_model import LookaheadWeights
from hetero_scheduler.predict.routing import chosen_experts


class Remembered(NamedTuple):
    """Of one text. `history` float32 `[num_layers, num_experts]`: shares of its passes, fading. `seen`
    `[S, M]`: what its images add at each layer, as `LookaheadWeights.seen` says it."""

    history: Shares
    seen: torch.Tensor


class LookaheadMlp(Predictor):
    """One text. Forecasts are of the layers that follow in the pass that runs; after the last one there is
    none, for the pass after it begins in the pinned prefix."""

    name: ClassVar[str] = "lookahead_mlp"

    def __init__(self, weights: LookaheadWeights, shape: LookaheadShape) -> None:
        self._weights, self.shape = weights, shape
        self._undecayed = 1.0 / shape.decays()
        self.reset()

    def another(self) -> LookaheadMlp:
        """For another text, on the same weights."""
        return LookaheadMlp(self._weights, self.shape)

    @property
    def device(self) -> torch.device:
        """Where it computes, and wants hidden states."""
        return self._weights.inner.device

    def reset(self) -> None:
        num_layers, num_experts = self.shape[:2]
        self._history = np.zeros((num_layers + self.shape.window, num_experts), dtype=np.float32)
        self._seen = self._weights.inner_bias
        self._step = self._layer = -1
        self._said: _Said | None = None

    @property
    def weights(self) -> LookaheadWeights:
        """Those of all texts."""
        return self._weights

    def remembered(self) -> Remembered:
        """All that it knows of the text: somebody else may go on from there."""
        return Remembered(self._history[: self.shape.num_layers].copy(), self._seen)

    def remember(self, history: Shares) -> None:
        """The text went on elsewhere, and `history` is as it stands now. `[num_layers, num_experts]`"""
        self._history[: self.shape.num_layers] = history

    def see(self, visual: torch.Tensor) -> None:
        """`visual` `[V]`: the mean visual embedding of the text's images, from now on."""
        if self.shape.visual_size:
            self._seen = self._weights.seen(visual)

    def observe(
        self,
        step: int,
        layer: int,
        router_logits: npt.NDArray[np.floating],
        hidden: npt.NDArray[np.floating] | None = None,
    ) -> None:
        """As in the contract. Raises ValueError without `hidden`, which it needs."""
        if hidden is None:
            raise ValueError("lookahead_mlp needs hidden states beside router logits")
        chosen = chosen_experts(router_logits, self.shape.top_k)[None]
        self.observe_tokens(step, layer, chosen, torch.from_numpy(np.asarray(hidden, dtype=np.float32)))

    def observe_tokens(
        self, step: int, layer: int, chosen: npt.NDArray[np.integer], pooled: torch.Tensor
    ) -> None:
        """`layer` routed the tokens of a pass. `chosen` `[tokens, top_k]`: their experts. `pooled`
        `[hidden_size]`: the mean of what its router was asked. On a GPU this waits for nothing."""
        self.observe_share(step, layer, shares_of(chosen, self.shape.num_experts), pooled)

    @torch.inference_mode()
    def observe_share(self, step: int, layer: int, share: Shares, pooled: torch.Tensor) -> None:
        """As `observe_tokens`, of tokens of which each expert had that `share`, `[num_experts]`."""
        self.keep_share(step, layer, share)
        if layer == self.shape.num_layers - 1:
            return
        seen = self._history[layer : layer + self.shape.window + 1].reshape(-1)
        weights = self._weights.inner
        history = torch.from_numpy(seen.copy()).to(weights, non_blocking=True)
        features = torch.cat([history, pooled.to(weights)])
        self._said = _Said(self._weights.scores(layer, features, self._seen))

    def keep_share(self, step: int, layer: int, share: Shares) -> None:
        """As `observe_share`, but nothing is predicted."""
        self._step, self._layer, self._said = step, layer, None
        self._history[layer] = faded(self._history[layer], share)

    def forecast(self) -> Forecast | None:
        if self._said is None:
            return None
        layers = tuple(
            range(self._layer + 1, min(self._layer + 1 + self.shape.window, self.shape.num_layers))
        )
        priority = self._said.priority().reshape(self.shape.window, -1)[: len(layers)]  # [layers, E]
        active = priority * self._undecayed[: len(layers), None]
        total = np.maximum(active.sum(axis=1, keepdims=True), self.shape.top_k)
        first_pos = self._step * self.shape.num_layers + layers[0]
        return Forecast((active / total)[None], layers, first_pos)


class _Said:
    """A prediction on its way to the host."""

    def __init__(self, scores: torch.Tensor) -> None:
        self._priority = torch.sigmoid(scores.float()).to("cpu", non_blocking=True)
        self._event: torch.cuda.Event | None = None
        if scores.device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record()

    def priority(self) -> npt.NDArray[np.float32]:
        """γ^(d-1) times the share that is expected. `[W · E]`"""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        priority: npt.NDArray[np.float32] = self._priority.numpy()
        return priority
