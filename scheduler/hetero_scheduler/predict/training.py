"""Training a group's predictor: teacher forcing, then scheduled sampling (SeqMoE §5.4).

First every input is the truth. Then a growing share of the inputs is replaced by what the model itself
predicted for that step, as happens when it predicts recursively. Both stages end when the documents held out
for validation stop improving, and keep the weights that did best there.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hetero_scheduler.predict.activation import predicted_activation
from hetero_scheduler.predict.losses import prediction_loss
from hetero_scheduler.predict.mamba2_model import GroupModel, GroupShape
from hetero_scheduler.predict.training_data import Batch, DocumentSplit, GroupData

Model = TypeVar("Model", bound=GroupModel)
Stage = Literal["teacher forcing", "scheduled sampling"]
MAX_GRADIENT = 1.0
"""Norm to which a gradient is clipped."""
STAGES: tuple[Stage, ...] = ("teacher forcing", "scheduled sampling")


@dataclass(frozen=True)
class TrainingOptions:
    """How long and how fast. With `minutes` unset, the same seed gives the same weights."""

    seed: int = 0
    epochs: int = 60
    """At most, in each stage."""
    minutes: float | None = None
    """After half of these no epoch of a stage starts. None: only epochs and patience end a stage."""
    patience: int = 6
    """Epochs without a better validation loss after which a stage ends."""
    window: int = 256
    """Steps in a training sequence; longer documents are cut."""
    batch: int = 4
    learning_rate: float = 4e-3
    weight_decay: float = 0.05
    sampled_share: float = 0.3
    """Share of inputs that are the model's own predictions at the end of scheduled sampling."""
    warmup: int = 20
    """Updates over which the learning rate rises."""


@dataclass(frozen=True)
class TrainingProgress:
    """One epoch is over. Losses are means over predicted layers of the validation documents."""

    stage: Stage
    epoch: int
    epochs: int
    train_loss: float
    validation_loss: float
    best_loss: float


def train_group(
    shape: GroupShape,
    data: GroupData,
    *,
    split: DocumentSplit,
    options: TrainingOptions,
    progress: Callable[[TrainingProgress], None] | None = None,
) -> GroupModel:
    """A trained model for the layers of `data`, on its device, ready to predict.

    Leaves torch's global random state as it was.
    """
    return train_model(lambda: GroupModel(shape), data, split=split, options=options, progress=progress)


def train_model(
    make: Callable[[], Model],
    data: GroupData,
    *,
    split: DocumentSplit,
    options: TrainingOptions,
    stages: Sequence[Stage] = STAGES,
    progress: Callable[[TrainingProgress], None] | None = None,
) -> Model:
    """What `make` gives, trained through `stages`; the rest as in `train_group`."""
    device = data.logits.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(options.seed)
        model = make().to(device)
        trainer = _Trainer(model, data, split, options)
        for stage in stages:
            trainer.run(stage, progress)
    return model.eval().requires_grad_(False)


def with_own_predictions(model: GroupModel, states: Tensor, share: float, draws: Tensor) -> Tensor:
    """`states` `[batch, steps, n, E]` with the model's own prediction in place of a share of the steps.

    A step is replaced where its draw `[batch, steps]`, uniform in [0, 1), is below `share`; the first step of
    a sequence has no prediction and stays true.
    """
    was_training = model.training
    model.eval()
    with torch.no_grad():
        logits, _ = model(states[:, :-1], model.initial_state(states.shape[0]))
        predicted = predicted_activation(logits, model.shape.top_k)
    model.train(was_training)
    is_replaced = (draws[:, 1:] < share)[..., None, None]
    return torch.cat([states[:, :1], torch.where(is_replaced, predicted, states[:, 1:])], dim=1)


def share_done(epoch: int, started: float, *, epochs: int, minutes: float | None) -> float:
    """How much of its epochs or minutes a run has used up, whichever is more, when `epoch` begins.

    `started`: when it began, by `time.monotonic`.
    """
    done = epoch / epochs
    if minutes is not None:
        done = max(done, (time.monotonic() - started) / (minutes * 60))
    return done


class _Trainer:
    """One model with its data and the random draws of its run."""

    def __init__(
        self, model: GroupModel, data: GroupData, split: DocumentSplit, options: TrainingOptions
    ) -> None:
        self.model, self.data, self.options = model, data, options
        self.train_windows = data.windows(split.train, options.window)
        self.validation_windows = data.windows(split.validation, options.window)
        if not len(self.train_windows) or not len(self.validation_windows):
            raise ValueError("every document is a single step: there is no next step to learn from")
        self.order = np.random.default_rng(options.seed)
        self.draws = torch.Generator().manual_seed(options.seed)
        self.updates = 0

    def run(self, stage: Stage, progress: Callable[[TrainingProgress], None] | None) -> None:
        """Train one stage to its end and leave the best weights in the model."""
        options, started = self.options, time.monotonic()
        minutes = None if options.minutes is None else options.minutes / len(STAGES)
        share = options.sampled_share if stage == "scheduled sampling" else 0.0
        optimizer = torch.optim.AdamW(_decayed(self.model, options.weight_decay), lr=options.learning_rate)
        best_loss, best, age = self._validate(share), copy.deepcopy(self.model.state_dict()), 0
        for epoch in range(options.epochs):
            done = share_done(epoch, started, epochs=options.epochs, minutes=minutes)
            if done >= 1.0 or age >= options.patience:
                break
            rate = options.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))
            train_loss = self._epoch(optimizer, rate=rate, share=share * min(1.0, 2 * done))
            validation_loss, age = self._validate(share), age + 1
            if validation_loss < best_loss:
                best_loss, best, age = validation_loss, copy.deepcopy(self.model.state_dict()), 0
            if progress is not None:
                progress(
                    TrainingProgress(stage, epoch + 1, options.epochs, train_loss, validation_loss, best_loss)
                )
        self.model.load_state_dict(best)

    def _epoch(self, optimizer: torch.optim.Optimizer, *, rate: float, share: float) -> float:
        """Every training window once; the mean loss. `share`: of the inputs that are the model's own."""
        self.model.train()
        losses = []
        for batch in self._batches(self.order.permutation(self.train_windows)):
            self.updates += 1
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, self.updates / self.options.warmup)
            loss = self._loss(batch, share, self.draws)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRADIENT)
            optimizer.step()
            losses.append(loss.item())
        return float(np.mean(losses))

    @torch.no_grad()
    def _validate(self, share: float) -> float:
        """Mean loss on the validation documents; with a share, the mean of true and of mixed inputs.

        The draws are the same each time, so that epochs compare.
        """
        self.model.eval()
        batches = list(self._batches(self.validation_windows))
        losses = [
            [self._loss(batch, part, torch.Generator().manual_seed(0)).item() for batch in batches]
            for part in sorted({0.0, share})
        ]
        return float(np.mean(losses))

    def _batches(self, windows: npt.NDArray[np.int64]) -> Iterator[Batch]:
        for start in range(0, len(windows), self.options.batch):
            yield self.data.batch(windows[start : start + self.options.batch])

    def _loss(self, batch: Batch, share: float, draws: torch.Generator) -> Tensor:
        """Mean over the predicted steps and layers."""
        states, model = batch.states, self.model
        inputs = states[:, :-1]
        if share > 0.0:
            uniform = torch.rand(inputs.shape[:2], generator=draws).to(states.device)
            inputs = with_own_predictions(model, inputs, share, uniform)
        logits, _ = model(inputs, model.initial_state(inputs.shape[0]))
        losses = prediction_loss(logits, states[:, 1:], batch.chosen[:, 1:])  # [windows, steps - 1, n]
        return losses[batch.is_real[:, 1:]].mean()


def _decayed(model: GroupModel, weight_decay: float) -> list[dict[str, object]]:
    """Weight decay for matrices only: not for norms, biases and the rates of the recurrence."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
