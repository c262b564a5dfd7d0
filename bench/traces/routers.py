"""Routers that say what a trace recorded, so that whoever listens to them hears a trained model.

`bench.routing_replay` puts recorded experts behind routers of random weights; a predictor would still hear
those, and a policy that changes what is chosen has to hear logits. Here these are replayed, and routers go on
from there as they always do.

    order in a pass, where a policy looks ahead:   1 early, 0 │ 2 early, 1 │ 3 early, 2 │ ... │ last
    where forecasts are made anew a layer ahead:   0, 1 early │ 1, 2 early │ 2, 3 early │ ... │ last
    otherwise:                                     0 │ 1 │ 2 │ ... │ last
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from bench.routing_replay import RecordedChoice
from hetero_runtime.hf.early_routers import EarlyRouters
from hetero_runtime.hf.router_choice import Choose, SteerableRouter, StockRouter
from hetero_runtime.hf.router_hooks import routed_layers
from hetero_runtime.hf.small_choice import SmallChooser, small_choosers
from hetero_runtime.hf.small_ops import RouterForward
from hetero_scheduler.trace import Trace

LOUD = 1e4
"""A logit above all others of a model of random weights."""


class Recital:
    """Says one token of `trace` after another to the routers of a model with `num_layers` MoE layers.

    `asks_early`: whether each router but the first is also asked one layer early, by a policy that looks
    ahead or a forecast; then the trace must hold that. Raises ValueError where it does not.
    """

    def __init__(self, trace: Trace, *, num_layers: int, device: torch.device, asks_early: bool) -> None:
        said = trace.logits[:, :num_layers, None]
        if asks_early:
            if trace.early is None:
                raise ValueError("the trace does not hold what routers say when they are asked early")
            said = np.concatenate([said, trace.early[:, :num_layers, None]], axis=2)
        self._said = RecordedChoice(said, device=device, dtype=torch.float16)  # [tokens, layers, 1 or 2, E]
        self._tokens = torch.from_numpy(trace.tokens).to(device, torch.long)
        self._num_layers, self._layer, self._is_under_way = num_layers, 0, False

    def seek(self, token: int) -> None:
        """The next pass begins with this token of the trace."""
        self._said.seek(token)

    def say(self, layer: int, num_tokens: int) -> torch.Tensor:
        """What the router of `layer` says of the pass's tokens, `[num_tokens, E]` float16: early, if its
        layer is not the one that runs."""
        if not self._is_under_way:
            self._said.begin(num_tokens)
            self._is_under_way = True
        said = self._said.of(layer)
        if layer != self._layer:
            assert layer == self._layer + 1, f"layer {layer} is asked while layer {self._layer} runs"
            return said[:, 1]
        self._layer = (layer + 1) % self._num_layers
        self._is_under_way = self._layer != 0
        return said[:, 0]

    def say_early(self, layer: int) -> torch.Tensor:
        """What the router of `layer`, which has not run yet, says of the pass's tokens to the input of the
        layer before it, whose router has spoken: `[num_tokens, E]` float16."""
        assert self._is_under_way and layer == self._layer, f"{layer} is asked early, {self._layer} is next"
        return self._said.of(layer)[:, 1]

    def next_token(self) -> torch.Tensor:
        """The token that follows those of the last pass, `[1]` int64."""
        return self._tokens[self._said.upcoming()]


def replay_routers(model: Any, trace: Trace) -> None:
    """From now on the routers of `model` say one token of `trace` after another; the trace's first layers,
    where the model has fewer. A step that was captured before must be captured again."""
    device, num_layers = next(model.parameters()).device, len(routed_layers(model))
    recite(model, Recital(trace, num_layers=num_layers, device=device, asks_early=False))


def recite(model: Any, recital: Recital) -> None:
    """From now on the routers of `model` say what `recital` says. Who chose in their place does so no more,
    and has to be put before them again."""
    for number, layer in enumerate(routed_layers(model)):
        forward = vars(layer.router).pop("forward", None)
        one_launch = forward if isinstance(forward, RouterForward) else None
        layer.router.forward = _Reciting(layer.router.forward, recital, number, one_launch=one_launch)


def recited_choosers(model: Any, recital: Recital) -> list[SteerableRouter]:
    """Routers of `model` that let a policy choose from what `recital` says, as few launches as they are
    without it. Who was put before them before has to be put there again."""
    layers = routed_layers(model)
    for layer in layers:
        vars(layer.router).pop("forward", None)
    choosers = small_choosers(model)
    recite(model, recital)
    return [
        StockRouter(model, layers[number])
        if isinstance(chooser, StockRouter)
        else _RecitingChooser(chooser, recital, number)
        for number, chooser in enumerate(choosers)
    ]


def say_tokens(model: Any, recital: Recital) -> None:
    """From now on the most likely next token of `model` is the trace's, so that greedy text is its text."""
    model.lm_head.forward = _Loud(model.lm_head.forward, recital)


@contextmanager
def early_routers_recite(recital: Recital) -> Iterator[None]:
    """Inside, whoever asks routers a layer early, behind the router of the layer before, hears `recital`.

    Their product is computed and given up: a step costs what it costs. What is captured inside stays so.
    """
    ask = EarlyRouters.__call__

    def reciting(routers: EarlyRouters, layer: int, hidden: torch.Tensor) -> torch.Tensor | None:
        logits = ask(routers, layer, hidden)
        return None if logits is None else recital.say_early(layer + 1).to(logits.dtype)

    with patch.object(EarlyRouters, "__call__", reciting):
        yield


class _Reciting:
    """The forward of one router, in place of transformers' `forward`. `one_launch`: what had replaced that,
    and then this is one launch too."""

    def __init__(
        self,
        forward: Callable[[torch.Tensor], Any],
        recital: Recital,
        layer: int,
        *,
        one_launch: RouterForward | None,
    ) -> None:
        self._forward, self._one_launch = forward, one_launch
        self._recital, self._layer = recital, layer

    def __call__(self, hidden: torch.Tensor) -> Any:
        said = self._recital.say(self._layer, hidden.shape[:-1].numel())
        if self._one_launch is not None:
            return self._one_launch.choose(said.float())
        with _InPlaceOfProduct(said):
            return self._forward(hidden)


class _RecitingChooser:
    """`chooser`, which hears `recital`. Products are left out, its own as in routers of one launch, and with
    it that for the layer to come, which is part of the same launch."""

    def __init__(self, chooser: SmallChooser, recital: Recital, layer: int) -> None:
        self._chooser, self._recital, self._layer = chooser, recital, layer

    def run(self, hidden: torch.Tensor, choose: Choose, *, following: SteerableRouter | None) -> Any:
        """As for SteerableRouter."""
        guess = None if following is None else following.scores(hidden)
        said = self._recital.say(self._layer, hidden.shape[:-1].numel())
        experts = choose(self._chooser.heard(said), guess)
        return said, self._chooser.weigh(said, experts), experts

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits, which rank as the scores would: no model of the benches has groups or a correction."""
        return self._recital.say(self._layer, hidden.shape[:-1].numel())


class _InPlaceOfProduct(TorchFunctionMode):
    """Inside, a product that gives logits is computed and gives others."""

    def __init__(self, said: torch.Tensor) -> None:
        super().__init__()
        self._said = said

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is not functional.linear:
            return result
        assert result.shape == self._said.shape, f"{self._said.shape} replayed for {result.shape}"
        return self._said.to(result.dtype)


class _Loud:
    """The forward of a head, with one token above all others."""

    def __init__(self, head: Callable[[torch.Tensor], torch.Tensor], recital: Recital) -> None:
        self._head, self._recital = head, recital

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._head(hidden)
        return logits.index_fill_(-1, self._recital.next_token(), LOUD)
