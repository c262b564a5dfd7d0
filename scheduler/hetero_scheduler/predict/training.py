"""Training a group's predictor: teacher forcing, then scheduled sampling (SeqMoE §5.4).

First every input is the truth. Then a growing share of the inputs is replaced by what the model itself
predicted for that step, as happens when it predicts recursively. Both stages end when the documents held out
for validation stop improving, and keep the weights that did best there. On a GPU an update is one CUDA graph.
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
from hetero_scheduler.predict.captured import CapturedStep, Step, set_rate
from hetero_scheduler.predict.losses import prediction_loss
from hetero_scheduler.predict.mamba2_model import GroupModel, GroupShape
from hetero_scheduler.predict.training_data import DocumentSplit, GroupData, Places

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


def with_own_predictions(model: GroupModel, states: Tensor, share: float | Tensor, draws: Tensor) -> Tensor:
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
        self.is_captured = data.logits.is_cuda
        self.order = np.random.default_rng(options.seed)
        self.draws = torch.Generator().manual_seed(options.seed)
        self.updates = 0

    def run(self, stage: Stage, progress: Callable[[TrainingProgress], None] | None) -> None:
        """Train one stage to its end and leave the best weights in the model."""
        options, started = self.options, time.monotonic()
        minutes = None if options.minutes is None else options.minutes / len(STAGES)
        share = options.sampled_share if stage == "scheduled sampling" else 0.0
        optimizer = self._make_optimizer()
        update = self._make_update(optimizer, is_mixed=share > 0.0)
        best_loss, best, age = self._validate(share), copy.deepcopy(self.model.state_dict()), 0
        for epoch in range(options.epochs):
            done = share_done(epoch, started, epochs=options.epochs, minutes=minutes)
            if done >= 1.0 or age >= options.patience:
                break
            rate = options.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))
            train_loss = self._epoch(optimizer, update, rate=rate, share=share * min(1.0, 2 * done))
            validation_loss, age = self._validate(share), age + 1
            if validation_loss < best_loss:
                best_loss, best, age = validation_loss, copy.deepcopy(self.model.state_dict()), 0
            if progress is not None:
                progress(
                    TrainingProgress(stage, epoch + 1, options.epochs, train_loss, validation_loss, best_loss)
                )
        self.model.load_state_dict(best)

    def _make_optimizer(self) -> torch.optim.AdamW:
        """One whose rate a captured update reads, where updates are captured."""
        groups, rate = _decayed(self.model, self.options.weight_decay), self.options.learning_rate
        if not self.is_captured:
            return torch.optim.AdamW(groups, lr=rate)
        on_device = torch.tensor(rate, device=self.data.logits.device)
        return torch.optim.AdamW(groups, lr=on_device, fused=True, capturable=True)

    def _make_update(self, optimizer: torch.optim.Optimizer, *, is_mixed: bool) -> Step:
        """An update by `self._inputs` of windows; gives the loss. `is_mixed`: a share of the inputs is the
        model's own, none is otherwise."""

        def update(tokens: Tensor, is_real: Tensor, draws: Tensor, share: Tensor) -> Tensor:
            loss = self._loss(Places(tokens, is_real), draws, share if is_mixed else None)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRADIENT)
            optimizer.step()
            return loss.detach()

        if not self.is_captured:
            return update
        self.model.train()
        set_rate(optimizer, 0.0)  # what runs before the capture changes no weight, and is then forgotten
        captured = CapturedStep(update, *self._inputs(self.train_windows[: self.options.batch], 0.0))
        for moments in optimizer.state.values():
            for moment in moments.values():
                moment.zero_()
        return captured

    def _epoch(self, optimizer: torch.optim.Optimizer, update: Step, *, rate: float, share: float) -> float:
        """Every training window once; the mean loss. `share`: of the inputs that are the model's own."""
        self.model.train()
        losses = []
        for windows in self._batches(self.order.permutation(self.train_windows)):
            self.updates += 1
            set_rate(optimizer, rate * min(1.0, self.updates / self.options.warmup))
            losses.append(update(*self._inputs(windows, share)).clone())
        return float(torch.stack(losses).mean())

    def _inputs(self, windows: npt.NDArray[np.int64], share: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What an update reads: where the windows lie, draws for their inputs, and the share. On the device;
        all of one shape where updates are captured."""
        rows, steps = len(windows), int(windows[:, 1].max())
        if self.is_captured:
            rows, steps = self.options.batch, int(self.train_windows[:, 1].max())
        places, device = self.data.place(windows, rows, steps), self.data.logits.device
        draws = torch.rand(rows, steps - 1, generator=self.draws)
        return *places, draws.to(device), torch.tensor(share, device=device)

    @torch.no_grad()
    def _validate(self, share: float) -> float:
        """Mean loss on the validation documents; with a share, the mean of true and of mixed inputs.

        The draws are the same each time, so that epochs compare.
        """
        self.model.eval()
        losses = []
        for windows in self._batches(self.validation_windows):
            places = self.data.place(windows, len(windows), int(windows[:, 1].max()))
            shape = len(windows), places.tokens.shape[1] - 1
            draws = torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(places.tokens.device)
            losses += [self._loss(places, draws, part or None) for part in sorted({0.0, share})]
        return float(torch.stack(losses).mean())

    def _batches(self, windows: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
        for start in range(0, len(windows), self.options.batch):
            yield windows[start : start + self.options.batch]

    def _loss(self, places: Places, draws: Tensor, share: float | Tensor | None) -> Tensor:
        """Mean over the predicted steps and layers. Without a share all inputs are true."""
        batch, model = self.data.at(places), self.model
        states, inputs = batch.states, batch.states[:, :-1]
        if share is not None:
            inputs = with_own_predictions(model, inputs, share, draws)
        logits, _ = model(inputs, model.initial_state(inputs.shape[0]))
        losses = prediction_loss(logits, states[:, 1:], batch.chosen[:, 1:]).mean(-1)  # [windows, steps - 1]
        is_real = batch.is_real[:, 1:]
        return (losses * is_real).sum() / is_real.sum()


def _decayed(model: GroupModel, weight_decay: float) -> list[dict[str, object]]:
    """Weight decay for matrices only: not for norms, biases and the rates of the recurrence."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
