"""The loss of a training step, and its coefficients, steered by what looks at held-out text find."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

from bench.models.model import ROUTER_Z
from bench.traces.forward import hidden_states
from bench.traces.look import Look
from bench.traces.steering import Steering
from bench.traces.terms import Companion, RouterTap, balance_loss, foresight_loss, kept_shares

BALANCE = Steering(wanted=0.965, coefficient=0.02, gain=15.0, least=5e-3, most=1.0, slack=0.004)
CONSISTENCY = Steering(wanted=0.0, coefficient=0.02, gain=0.04, most=1.0, slack=0.3)
"""Measured by the points by which LRU hits are off in the smaller cache."""
DEPARTURE = Steering(wanted=0.0, coefficient=0.01, gain=0.08, least=1e-3, most=2.0, slack=0.3)
"""Measured by the points by which they are below what is wanted there."""
NOVELTY = Steering(wanted=0.0, coefficient=0.01, gain=0.08, most=1.0, slack=0.3)
"""Measured by the points by which they are below it in the larger one."""
FORESIGHT = Steering(wanted=0.9, coefficient=0.1, gain=4.0, most=20.0, slack=0.005)
_TINY = 1e-6


@dataclass(frozen=True)
class Wants:
    """What routing shall be like. None: that term is left out of the loss."""

    entropy: float = BALANCE.wanted
    lru: tuple[float, float] | None = None
    """Hits in percent at the residencies of `look.LOOKED_AT`, the smaller first."""
    foreseen: float | None = None
    """Share of experts among the companion's k + 3 best."""
    ahead: int = 1
    """Steps from the last routing that the companion has seen to the one it foresees."""


class Coefficients:
    """The steered ones, by name, on the device for a captured step to read."""

    def __init__(self, wants: Wants, device: torch.device) -> None:
        self.wants = wants
        self.steerings = {"balance": replace(BALANCE, wanted=wants.entropy)}
        if wants.lru is not None:
            self.steerings |= {
                "consistency": replace(CONSISTENCY),
                "departure": replace(DEPARTURE),
                "novelty": replace(NOVELTY),
            }
        if wants.foreseen is not None:
            self.steerings["foresight"] = replace(FORESIGHT, wanted=wants.foreseen)
        self.values = {
            name: torch.tensor(steering.coefficient, device=device)
            for name, steering in self.steerings.items()
        }

    def follow(self, look: Look) -> None:
        """Steer every coefficient by what `look` found."""
        measured = {"balance": look.entropy}
        if self.wants.lru is not None:
            small, large = (hit - wanted for hit, wanted in zip(look.lru, self.wants.lru, strict=True))
            measured |= {"consistency": small, "departure": -small, "novelty": -large}
        if look.foreseen is not None:
            measured["foresight"] = look.foreseen
        for name, steering in self.steerings.items():
            self.values[name].fill_(steering.update(measured[name]))

    def state(self) -> dict[str, float]:
        """The coefficients, for a checkpoint and for the log."""
        return {name: steering.coefficient for name, steering in self.steerings.items()}

    def load(self, state: dict[str, Any]) -> None:
        """Go on with the coefficients of `state` that this run has too."""
        for name, steering in self.steerings.items():
            if name in state:
                steering.coefficient = max(steering.least, min(steering.most, state[name]))
                self.values[name].fill_(steering.coefficient)

    def __str__(self) -> str:
        return "  ".join(f"{name} {value:.2g}" for name, value in self.state().items())


class Objective:
    """The loss of windows `[batch, length + 1]` under `coefficients`."""

    def __init__(
        self,
        model: Qwen3MoeForCausalLM,
        tap: RouterTap,
        coefficients: Coefficients,
        companion: Companion | None = None,
    ) -> None:
        self._model, self._tap, self._companion = model, tap, companion
        self._values = coefficients.values

    def __call__(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        """What is minimised, and the cross-entropy in it."""
        inputs, targets = windows[:, :-1], windows[:, 1:]
        logits = self._model.lm_head(hidden_states(self._model, inputs))
        cross_entropy = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        routing = self._tap.take(len(windows))
        probabilities = routing.logits.softmax(-1)
        loss = cross_entropy + ROUTER_Z * routing.logits.logsumexp(-1).square().mean()
        loss = loss + self._values["balance"] * balance_loss(probabilities, routing.chosen)
        if "consistency" in self._values:
            kept = kept_shares(probabilities, routing.chosen)
            loss = loss - self._values["consistency"] * (kept.recent + _TINY).log().mean()
            loss = loss + self._values["departure"] * kept.recent.mean()
            loss = loss + self._values["novelty"] * kept.earlier.mean()
        if self._companion is not None:
            expected, drawn = self._companion.expect(routing), self._companion.drawn
            pull = foresight_loss(expected.detach()[:, :, drawn], routing.logits[drawn])
            loss = loss + self._values["foresight"] * pull
            loss = loss + foresight_loss(expected, routing.logits.detach())
        return loss, cross_entropy.detach()
