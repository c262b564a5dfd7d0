"""Training of the lookahead predictor: soft binary cross-entropy on decayed targets (VisMMOE §3.3.2)."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from hetero_scheduler.predict.lookahead_features import LookaheadShape, Passes, seen_at_layers, shares_ahead
from hetero_scheduler.predict.lookahead_model import LookaheadModel, LookaheadWeights

MAX_GRADIENT = 1.0
"""Norm to which a gradient is clipped."""
_LEAST_RATE, _MOST_RATE = 1e-3, 0.999
"""Bounds of the rates that the output begins with."""


@dataclass(frozen=True)
class LookaheadOptions:
    """How long and how fast. With `minutes` unset, the same seed gives the same weights."""

    seed: int = 0
    epochs: int = 40
    minutes: float | None = None
    """No epoch starts after these. None: only epochs and patience end the training."""
    patience: int = 5
    """Epochs without a better loss on the validation documents after which it ends."""
    batch: int = 64
    width: int = 128
    """Units of the bottleneck."""
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    dropout: float = 0.2
    prompts: float = 0.25
    """Weight of all prompts together; single tokens have the rest."""


@dataclass(frozen=True)
class LookaheadProgress:
    """One epoch is over."""

    epoch: int
    epochs: int
    train_loss: float
    validation_loss: float
    best_loss: float


def train_lookahead(
    passes: Passes,
    shape: LookaheadShape,
    *,
    train: npt.NDArray[np.int64],
    validation: npt.NDArray[np.int64],
    options: LookaheadOptions,
    progress: Callable[[LookaheadProgress], None] | None = None,
) -> LookaheadWeights:
    """Learn from the documents `train`, stop by the documents `validation`; float32, on the CPU.

    Raises ValueError where there is nothing to learn from: one layer, or no pass of either documents. Leaves
    torch's global random state as it was.
    """
    if shape.num_speaking < 1:
        raise ValueError("a model with one MoE layer has no layer to look ahead to")
    parts = [passes.take(np.isin(passes.document, documents)) for documents in (train, validation)]
    if len(parts[0]) < 2 or not len(parts[1]):
        raise ValueError(f"{len(parts[0])} passes to train on and {len(parts[1])} to validate with: too few")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        trainer = _Trainer(
            _Lessons(parts[0], shape, options), _Lessons(parts[1], shape, options), shape, options
        )
        trainer.run(progress)
    return trainer.model.eval().requires_grad_(False).fold()


class _Lessons:
    """Passes as batches: features, what was seen, targets, weights."""

    def __init__(self, passes: Passes, shape: LookaheadShape, options: LookaheadOptions) -> None:
        self.passes, self._shape = passes, shape
        self._decays = torch.from_numpy(shape.decays())[:, None]
        prompts = passes.is_prompt
        each = {True: options.prompts, False: 1.0 - options.prompts}
        count = {kind: max(1, int((prompts == kind).sum())) for kind in each}
        is_mixed = 0 < prompts.sum() < len(passes)
        shares = np.where(prompts, each[True] / count[True], each[False] / count[False]) * len(passes)
        self._weight = torch.from_numpy(shares if is_mixed else np.ones(len(passes))).float()

    def batches(self, numbers: npt.NDArray[np.int64], size: int) -> Iterator[tuple[Tensor, ...]]:
        """Features `[B, S, F]`, visual `[B, V]`, targets `[B, S, W, E]` (NaN beyond the last layer), weights
        `[B]`."""
        for start in range(0, len(numbers), size):
            chosen = numbers[start : start + size]
            part, window = self.passes.take(chosen), self._shape.window
            hidden = part.hidden[:, :-1].astype(np.float32)
            features = np.concatenate([seen_at_layers(part, window), hidden], axis=-1)
            targets = torch.from_numpy(shares_ahead(part, window)) * self._decays
            visual = torch.from_numpy(part.visual[part.document].astype(np.float32))
            yield torch.from_numpy(features), visual, targets, self._weight[torch.from_numpy(chosen)]

    def base_rates(self) -> Tensor:
        """Mean target. `[S, W, E]`; beyond the last layer the least."""
        total = np.zeros(shares_ahead(self.passes.take(np.arange(1)), self._shape.window).shape[1:])
        for start in range(0, len(self.passes), 256):
            part = self.passes.take(np.arange(start, min(start + 256, len(self.passes))))
            total += np.nan_to_num(shares_ahead(part, self._shape.window)).sum(axis=0)
        return torch.from_numpy(total / len(self.passes)).float() * self._decays


class _Trainer:
    def __init__(
        self, train: _Lessons, validation: _Lessons, shape: LookaheadShape, options: LookaheadOptions
    ) -> None:
        self._train, self._validation, self._options = train, validation, options
        self.model = LookaheadModel(shape, width=options.width, dropout=options.dropout)
        rates = train.base_rates().clamp(_LEAST_RATE, _MOST_RATE)
        with torch.no_grad():
            self.model.outer_bias.copy_(torch.logit(rates).reshape(len(rates), -1))
            self.model.outer.mul_(0.1)
        self._order = np.random.default_rng(options.seed)
        matrices = [p for p in self.model.parameters() if p.ndim > 2]
        others = [p for p in self.model.parameters() if p.ndim <= 2]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": options.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=options.learning_rate,
        )

    def run(self, progress: Callable[[LookaheadProgress], None] | None) -> None:
        """Train to the end and leave the best weights in the model."""
        options, began = self._options, time.monotonic()
        best_loss, best, age = math.inf, copy.deepcopy(self.model.state_dict()), 0
        for epoch in range(options.epochs):
            done = epoch / options.epochs
            if options.minutes is not None:
                done = max(done, (time.monotonic() - began) / (60 * options.minutes))
            if done >= 1.0 or age >= options.patience:
                break
            train_loss = self._epoch(options.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done)))
            loss, age = self._validate(), age + 1
            if loss < best_loss:
                best_loss, best, age = loss, copy.deepcopy(self.model.state_dict()), 0
            if progress is not None:
                progress(LookaheadProgress(epoch + 1, options.epochs, train_loss, loss, best_loss))
        self.model.load_state_dict(best)

    def _epoch(self, rate: float) -> float:
        self.model.train()
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        losses = []
        order = self._order.permutation(len(self._train.passes))
        size = self._options.batch
        if len(order) % size == 1:  # a norm needs two
            order = order[:-1]
        for batch in self._train.batches(order, size):
            loss = _loss(self.model, batch)
            self._optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRADIENT)
            self._optimizer.step()
            losses.append(loss.item())
        return float(np.mean(losses))

    @torch.no_grad()
    def _validate(self) -> float:
        self.model.eval()
        numbers = np.arange(len(self._validation.passes))
        losses = [
            (_loss(self.model, batch).item(), len(batch[0]))
            for batch in self._validation.batches(numbers, self._options.batch)
        ]
        return float(np.average([loss for loss, _ in losses], weights=[count for _, count in losses]))


def _loss(model: LookaheadModel, batch: tuple[Tensor, ...]) -> Tensor:
    features, visual, targets, weight = batch
    is_real = ~torch.isnan(targets)
    each = functional.binary_cross_entropy_with_logits(
        model(features, visual), torch.nan_to_num(targets), reduction="none"
    )
    return (each * is_real * weight[:, None, None, None]).sum() / is_real.sum()
