"""The predictor of one group of layers: activation states in, scores of the next step out (SeqMoE §5.2).

    activation states [batch, steps, n · E]
      └─ Linear ─ (norm ─ Mamba2 ─ +)× blocks ─ norm ─ Linear ─┐
                                        logits [batch, steps, n, E], each for the step after its input

The parts between the two projections carry the names of mamba_ssm's backbone: `layers.i.norm`,
`layers.i.mixer`, `norm_f`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from hetero_scheduler.predict.activation import predicted_activation
from hetero_scheduler.predict.mamba2_block import NORM_EPS, BlockState, Mamba2Block, Mamba2Sizes

State = tuple[BlockState, ...]
"""What a group's model remembers: one state a block."""


@dataclass(frozen=True)
class GroupShape:
    """Sizes of the model for one group of layers."""

    num_layers: int
    num_experts: int
    top_k: int
    num_blocks: int = 2
    sizes: Mamba2Sizes = field(default_factory=Mamba2Sizes)
    dropout: float = 0.0
    """Share of the hidden features left out while training, before the first block and after the last."""

    @property
    def features(self) -> int:
        """n · E: layers and experts as one dimension."""
        return self.num_layers * self.num_experts


class ResidualMixer(nn.Module):
    """A mixer on the normed input, added to the input."""

    def __init__(self, sizes: Mamba2Sizes) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(sizes.d_model, eps=NORM_EPS)
        self.mixer = Mamba2Block(sizes)

    def forward(self, inputs: Tensor, state: BlockState) -> tuple[Tensor, BlockState]:
        """`[batch, steps, d_model]`"""
        output, state = self.mixer(self.norm(inputs), state)
        return inputs + output, state

    def step(self, inputs: Tensor, state: BlockState) -> tuple[Tensor, BlockState]:
        """`[batch, d_model]`"""
        output, state = self.mixer.step(self.norm(inputs), state)
        return inputs + output, state


class GroupModel(nn.Module):
    """Predicts the experts of a group's layers. Stateless: a call takes a state and gives the next back."""

    def __init__(self, shape: GroupShape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.sizes.d_model
        self.project = nn.Linear(shape.features, width)
        self.layers = nn.ModuleList(ResidualMixer(shape.sizes) for _ in range(shape.num_blocks))
        self.norm_f = nn.RMSNorm(width, eps=NORM_EPS)
        self.dropout = nn.Dropout(shape.dropout)
        self.head = nn.Linear(width, shape.features)

    def initial_state(self, batch: int) -> State:
        """The state before the first step of `batch` sequences."""
        return tuple(layer.mixer.initial_state(batch) for layer in self._blocks())

    def forward(self, activations: Tensor, state: State) -> tuple[Tensor, State]:
        """A sequence: `activations` `[batch, steps, n, E]`; logits of that shape, each for the step after."""
        hidden, states = self.dropout(self.project(activations.flatten(-2))), []
        for layer, before in zip(self._blocks(), state, strict=True):
            hidden, after = layer(hidden, before)
            states.append(after)
        return self._logits(hidden), tuple(states)

    def step(self, activations: Tensor, state: State) -> tuple[Tensor, State]:
        """One step: `activations` `[batch, n, E]`; logits of the same shape for the next one."""
        hidden, states = self.project(activations.flatten(-2)), []
        for layer, before in zip(self._blocks(), state, strict=True):
            hidden, after = layer.step(hidden, before)
            states.append(after)
        return self._logits(hidden), tuple(states)

    def rollout(self, logits: Tensor, state: State, steps: int) -> Tensor:
        """Recursive prediction: the newest prediction is the next input, `steps` times.

        `logits` `[batch, n, E]` and `state` as `step` gave them; the caller's state is untouched, so that the
        next one-step prediction goes on from it. Returns `[steps, batch, n, E]`: the steps after `logits`.
        """
        predictions = []
        for _ in range(steps):
            logits, state = self.step(predicted_activation(logits, self.shape.top_k), state)
            predictions.append(logits)
        return torch.stack(predictions) if predictions else logits.new_zeros(0, *logits.shape)

    def _blocks(self) -> list[ResidualMixer]:
        return cast("list[ResidualMixer]", list(self.layers))

    def _logits(self, hidden: Tensor) -> Tensor:
        shape = self.shape
        logits: Tensor = self.head(self.dropout(self.norm_f(hidden)))
        return logits.reshape(*logits.shape[:-1], shape.num_layers, shape.num_experts)
