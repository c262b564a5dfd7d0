"""Mamba2 forecasts: one model a group of layers, run when the group's last layer has routed (SeqMoE §5.3)."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch

from hetero_scheduler.predict.activation import activation_state
from hetero_scheduler.predict.base import Forecast, Predictor, Probabilities
from hetero_scheduler.predict.mamba2_compiled import CompiledState, Weights, advance, roll_out
from hetero_scheduler.predict.mamba2_model import GroupModel
from hetero_scheduler.trace import Trace

HORIZON = 8
"""Steps of a forecast: the next one, and those predicted recursively (SeqMoE §9.1). Each costs as much as the
first; on the device those beyond the nearest are forecast beside the layers that follow."""


class Mamba2Predictor(Predictor):
    """One sequence's routing history, and what it says of the next `horizon` steps.

    `models[g]` predicts the layers of group g, from 0 upwards without a gap. While steps come in, group g's
    forecast appears after its last layer, for the steps after that one; each step of it holds, for every
    layer, shares that sum to one (the distribution that training aligns with the activation states).
    Prompts are read by torch, single steps by compiled loops.
    """

    name: ClassVar[str] = "mamba2"

    def __init__(self, models: Sequence[GroupModel], horizon: int = HORIZON) -> None:
        """Raise ValueError for no models, models of different routers, or a horizon below 1."""
        routers = {(model.shape.num_experts, model.shape.top_k) for model in models}
        if len(routers) != 1 or horizon < 1:
            raise ValueError(
                f"a horizon of {horizon} over routers {sorted(routers)}; give one router, 1 or more"
            )
        self.models = [model.eval().requires_grad_(False) for model in models]
        self.horizon = horizon
        self.groups = _consecutive([model.shape.num_layers for model in models])
        self.num_layers = self.groups[-1].stop
        ((self.num_experts, self.top_k),) = routers
        self._group_of = [g for g, group in enumerate(self.groups) for _ in group]
        self._weights = [Weights.of(model) for model in self.models]
        self.reset()

    def another(self) -> Self:
        """A predictor for another text, on the same weights."""
        other = copy.copy(self)
        other.reset()
        return other

    def reset(self) -> None:
        """A new document: every model starts from its initial state."""
        self._states = [CompiledState.of(model.initial_state(1)) for model in self.models]
        self._logits = np.zeros((self.num_layers, self.num_experts), np.float32)
        self._forecast: Forecast | None = None

    def observe(
        self,
        step: int,
        layer: int,
        router_logits: npt.NDArray[np.floating],
        hidden: npt.NDArray[np.floating] | None = None,
    ) -> None:
        """As in the contract; the experts with the highest logits count as activated.

        At a trigger layer one step of the group's model runs, then the recursive ones.
        """
        self._logits[layer] = router_logits
        group = self.groups[self._group_of[layer]]
        self._forecast = self._run(group, step) if layer == group.stop - 1 else None

    def forecast(self) -> Forecast | None:
        """Of the group that the last observed layer completed; None after any other layer."""
        return self._forecast

    @torch.no_grad()
    def prefill(self, trace: Trace) -> tuple[Forecast, ...]:
        """Read a prompt's routing at once, after `reset`. The forecasts of all groups for what follows it.

        `trace`: one document, whose first token is step 0. Equal to observing it step by step. Raises
        ValueError for a trace of another model or of several documents.
        """
        if (trace.num_layers, trace.num_experts) != (self.num_layers, self.num_experts):
            raise ValueError(
                f"the prompt has {trace.num_layers} layers × {trace.num_experts} experts, "
                f"the predictor {self.num_layers} × {self.num_experts}"
            )
        if len(trace.bounds) != 2:
            raise ValueError(f"a prompt is one document, not {len(trace.bounds) - 1}")
        forecasts = []
        for g, (model, group) in enumerate(zip(self.models, self.groups, strict=True)):
            logits = torch.from_numpy(trace.logits[:, group.start : group.stop].astype(np.float32))
            predicted, state = model(self._activation(logits)[None], model.initial_state(1))
            self._states[g] = CompiledState.of(state)
            shares = roll_out(
                self._weights[g],
                self._states[g],
                predicted[0, -1].numpy(),
                top_k=self.top_k,
                horizon=self.horizon,
            )
            forecasts.append(self._forecast_of(group, shares, trace.num_tokens - 1))
        self._forecast = forecasts[-1]
        return tuple(forecasts)

    def states(self) -> tuple[CompiledState, ...]:
        """Copies of what the models remember, one a group."""
        return tuple(CompiledState(state.conv.copy(), state.ssm.copy()) for state in self._states)

    def restore(self, states: Sequence[CompiledState]) -> None:
        """Go on from `states`, one a group, which are copied. There is no forecast until the next trigger."""
        assert len(states) == len(self.groups), f"{len(states)} states for {len(self.groups)} groups"
        self._states = [CompiledState(state.conv.copy(), state.ssm.copy()) for state in states]
        self._forecast = None

    def _run(self, group: range, step: int) -> Forecast:
        g = self._group_of[group.start]
        routed = self._logits[group.start : group.stop]
        shares = advance(self._weights[g], self._states[g], routed, top_k=self.top_k, horizon=self.horizon)
        return self._forecast_of(group, shares, step)

    def _forecast_of(self, group: range, shares: Probabilities, step: int) -> Forecast:
        """`shares` `[horizon, n, E]`: of the steps after `step`."""
        first_pos = (step + 1) * self.num_layers + group.start
        return Forecast(probabilities=shares, layers=tuple(group), first_pos=first_pos)

    def _activation(self, logits: torch.Tensor) -> torch.Tensor:
        return activation_state(logits, logits.topk(self.top_k, dim=-1).indices)


def _consecutive(lengths: Sequence[int]) -> tuple[range, ...]:
    """Ranges of these lengths, end to end from 0."""
    ends = itertools.accumulate(lengths, initial=0)
    return tuple(range(first, last) for first, last in itertools.pairwise(ends))
