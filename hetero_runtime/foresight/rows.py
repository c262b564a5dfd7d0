"""The texts under way, each with a predictor of its own."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from hetero_runtime.foresight.text import Said, Text
from hetero_runtime.hf.early_routers import EarlyRouters
from hetero_runtime.plan.demand import PREDICTOR_TOKENS
from hetero_scheduler.predict import Forecast, Predictor
from hetero_scheduler.predict.routing import RouterShape, chosen_experts
from hetero_scheduler.trace import Trace

HALF_MAX = np.finfo(np.float16).max

Logits = npt.NDArray[np.float16]
"""Router logits in the dtype that traces keep, and so the one that predictors are trained on."""


class Row(Text):
    """One text, by a predictor of whole steps. Its steps count from the first token that its predictor has
    read. `early_routers`: for a predictor that asks for the next layer's router."""

    def __init__(
        self, predictor: Predictor, shape: RouterShape, early_routers: EarlyRouters | None = None
    ) -> None:
        super().__init__()
        self._predictor, self._shape, self._early_routers = predictor, shape, early_routers
        self._step = 0
        self._prompt: list[Logits] = []
        self._heard: Logits | None = None
        self._heard_early: Logits | None = None

    def begin(self) -> None:
        self._predictor.reset()
        self._step = 0
        self.is_new = False

    def begin_pass(self) -> None:
        self._prompt.clear()
        self._heard = self._heard_early = None

    def begin_step(self, token: int) -> list[Forecast]:
        return _each(self._predictor.begin_step(self._step, token))

    def hear(self, layer: int, logits: torch.Tensor, hidden: torch.Tensor) -> None:
        self._heard = as_half(logits)
        if self._early_routers is not None and len(logits) == 1:
            early = self._early_routers(layer, hidden)
            self._heard_early = None if early is None else as_half(early)

    def speak(self, layer: int) -> list[Said]:
        if self._heard is None:
            return []
        heard, early, self._heard, self._heard_early = self._heard, self._heard_early, None, None
        said = [Said(forecast, runs_now=False) for forecast in self.observe(layer, heard)]
        if early is not None:
            said += [Said(forecast, runs_now=True) for forecast in self.observe_next(layer + 1, early)]
        return said

    def observe_next(self, layer: int, logits: Logits) -> list[Forecast]:
        """The router of `layer`, asked early, said `logits` `[1, num_experts]` of the token that runs."""
        return _each(self._predictor.observe_next(self._step, layer, logits[0]))

    def observe(self, layer: int, logits: Logits) -> list[Forecast]:
        """`layer` routed a token, or a prompt of several. `logits`: `[tokens, num_experts]`. What that lets
        the predictor say anew; of a prompt it speaks after the last layer."""
        return self._observe_token(layer, logits[0]) if len(logits) == 1 else self._read(layer, logits)

    def _observe_token(self, layer: int, logits: Logits) -> list[Forecast]:
        self._predictor.observe(self._step, layer, logits)
        self._step += layer == self._shape.num_layers - 1
        return _each(self._predictor.forecast())

    def _read(self, layer: int, logits: Logits) -> list[Forecast]:
        assert layer == len(self._prompt), f"layer {layer} routed after {len(self._prompt)} others"
        self._prompt.append(logits[-PREDICTOR_TOKENS:])
        if len(self._prompt) < self._shape.num_layers:
            return []
        trace = _trace_of(np.stack(self._prompt, axis=1), self._shape.top_k)
        self._prompt.clear()
        self._step = trace.num_tokens
        return list(self._predictor.prefill(trace))


class Rows:
    """Places for texts. `take` and `give_back` may be called by any thread, `row` by whose turn it is."""

    def __init__(self, rows: Sequence[Text]) -> None:
        self._rows = list(rows)
        self._free = list(range(len(rows)))
        self._guard = threading.Lock()

    def take(self) -> int:
        """A place for a new text; there must be one."""
        with self._guard:
            place = heapq.heappop(self._free)
        self._rows[place].is_new = True
        return place

    def give_back(self, place: int) -> None:
        """The text at `place` has ended."""
        with self._guard:
            heapq.heappush(self._free, place)

    def row(self, place: int) -> Text:
        """The text at `place`."""
        return self._rows[place]

    def active(self) -> list[int]:
        """Places that are taken, ascending."""
        with self._guard:
            return [place for place in range(len(self._rows)) if place not in self._free]


def as_half(logits: torch.Tensor) -> Logits:
    """A copy of `logits` on the host; where float16 does not reach, it holds its ends."""
    half: Logits = np.clip(logits.detach().to(torch.float16).cpu().numpy(), -HALF_MAX, HALF_MAX)
    return half


def at_pass(forecast: Forecast, number: int, *, num_layers: int) -> Forecast:
    """`forecast`, its next run taking place in that pass of the engine."""
    return replace(forecast, first_pos=number * num_layers + forecast.layers[0])


def _each(forecast: Forecast | None) -> list[Forecast]:
    return [] if forecast is None else [forecast]


def _trace_of(logits: Logits, top_k: int) -> Trace:
    """A prompt as one document. `logits`: `[tokens, layers, experts]`"""
    num_tokens = len(logits)
    return Trace(
        logits,
        chosen_experts(logits, top_k).astype(np.int32),
        np.zeros(num_tokens, dtype=np.int32),
        np.array([0, num_tokens], dtype=np.int64),
    )
