"""Somebody else's choice inside transformers' own routers.

    hidden ─► router: logits ─► scores ─► top-k ──────────────────► weights of what was chosen
                                  └────► chooser ─► other experts ──┘

Every router of a steerable model takes exactly one top-k of width `num_experts`. It is intercepted there: the
experts are exchanged, their values are gathered from the same scores, and the router goes on with its own
normalisation and scaling. So the selection changes, and weights are those of the unmodified scores.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hetero_runtime.errors import CheckpointError
from hetero_runtime.hf.router_hooks import RoutedLayer, routed_layers, router_top_k

_SOFTMAX = frozenset({functional.softmax, torch.softmax, torch.Tensor.softmax})
_TOP_K = frozenset({torch.topk, torch.Tensor.topk})


class RouterScores(NamedTuple):
    """What one router says of `T` tokens.

    `scores` floats `[T, E]`: what it takes its top-k of, before a softmax where it has one (which changes no
    order); -inf where it excludes an expert. `own` int64 `[T, top_k]`: its choice.
    """

    scores: torch.Tensor
    own: torch.Tensor


Chooser = Callable[[int, RouterScores, torch.Tensor | None], torch.Tensor]
"""`choose(layer, said, guess)` gives experts int64 `[T, top_k]` on the device of `said`.

`guess` floats `[T, E]`: the scores of the next layer's router on this layer's input; None for the last
layer, and where nobody looks ahead.
"""


Choose = Callable[[RouterScores, torch.Tensor | None], torch.Tensor]
"""A Chooser, asked about one layer."""


class SteerableRouter(Protocol):
    """One that lets somebody else choose. `hidden`: what its module is asked, `[..., H]`."""

    def run(self, hidden: torch.Tensor, choose: Choose, *, following: SteerableRouter | None) -> Any:
        """What its module returns, having selected what `choose` says, who is also told what `following`, one
        of the same kind, says of `hidden`. `following` speaks first, where they do not speak together."""

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """What it would say of `hidden`. floats `[T, E]`"""


def let_choose(
    model: Any, choose: Chooser, *, looks_ahead: bool, routers: Sequence[SteerableRouter] | None = None
) -> None:
    """From now on `choose` decides what every router of `model` selects; layers count MoE layers.

    `routers`: who stands in for them, one a layer; None: transformers' own. Raises what `routed_layers`
    raises. A router without its one top-k raises CheckpointError when it runs.
    """
    layers = routed_layers(model)
    if routers is None:
        routers = [StockRouter(model, layer) for layer in layers]
    for index, (layer, router) in enumerate(zip(layers, routers, strict=True)):
        is_last = index + 1 == len(layers)
        following = None if is_last or not looks_ahead else routers[index + 1]
        layer.router.forward = _choosing(index, router, following, choose)


class StockRouter:
    """A router as transformers wrote it."""

    def __init__(self, model: Any, layer: RoutedLayer) -> None:
        self._name, self._top_k = layer.name, router_top_k(model)
        self._num_experts = layer.num_experts
        self._forward = layer.router.forward
        self._block: nn.Module = model.get_submodule(layer.name)

    def run(self, hidden: torch.Tensor, choose: Choose, *, following: SteerableRouter | None) -> Any:
        """As for SteerableRouter, `following` of any kind."""
        guess = None if following is None else following.scores(hidden)
        return self._run(hidden, lambda said: choose(said, guess))

    def _run(self, hidden: torch.Tensor, choose: Callable[[RouterScores], torch.Tensor]) -> Any:
        with _OneTopK(self._num_experts, self._top_k, choose) as top_k:
            output = self._forward(hidden, *router_arguments(self._block, self._forward))
        if top_k.num_found != 1:
            raise CheckpointError(
                f"{self._name}: its router takes {top_k.num_found} top-k of {self._num_experts} experts, not "
                "one; routing policies do not cover it, write routing.policy: exact"
            )
        return output

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """As for SteerableRouter."""
        said: list[RouterScores] = []

        def listen(router_said: RouterScores) -> torch.Tensor:
            said.append(router_said)
            return router_said.own

        self._run(hidden, listen)
        return said[0].scores


def router_arguments(block: nn.Module, forward: Callable[..., Any]) -> list[Any]:
    """What `forward` of a router of the MoE `block` takes besides hidden states: one is handed the correction
    bias by its block, which keeps it under the parameter's name. Raises AttributeError for anything else."""
    names = list(inspect.signature(forward).parameters)[1:]
    return [getattr(block, name) for name in names]


class _OneTopK(TorchFunctionMode):
    """Inside, the top-k of `num_experts` scores selects what `choose` says."""

    def __init__(self, num_experts: int, top_k: int, choose: Callable[[RouterScores], torch.Tensor]) -> None:
        super().__init__()
        self._width, self._top_k, self._choose = num_experts, top_k, choose
        self._logits: torch.Tensor | None = None
        self.num_found = 0

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in _SOFTMAX and args[0].shape[-1] == self._width:
            self._logits = args[0]
        if function not in _TOP_K or args[0].shape[1:] != (self._width,) or result[1].shape[1] != self._top_k:
            return result
        self.num_found += 1
        compared, own = args[0], result[1]
        chosen = self._choose(RouterScores(self._selection_scores(compared), own))
        return torch.return_types.topk((compared.gather(1, chosen), chosen))

    def _selection_scores(self, compared: torch.Tensor) -> torch.Tensor:
        """A softmax is undone; an expert whose probability was set to 0 is excluded."""
        if self._logits is None:
            return compared.float()
        return self._logits.float().masked_fill(compared == 0, float("-inf"))


def _choosing(
    index: int, router: SteerableRouter, following: SteerableRouter | None, choose: Chooser
) -> Callable[..., Any]:
    def forward(hidden: torch.Tensor, *_: Any) -> Any:
        return router.run(hidden, partial(choose, index), following=following)

    return forward
