"""Learning what a token, and the next router asked early, add to a predictor's forecasts.

The predictor stays as it is. First the token's part is learned: the divergence of the pooled forecast from
the true activation state is made small, epoch after epoch, until documents held out for validation stop
improving. Then two numbers a layer weigh that forecast against the next router's word; this is a convex
problem of 2 L numbers, solved at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hetero_scheduler.predict.activation import activation_state
from hetero_scheduler.predict.losses import divergence_loss
from hetero_scheduler.predict.mamba2_model import GroupModel
from hetero_scheduler.predict.refinement import SMALLEST, Refinement, Shares
from hetero_scheduler.predict.training import share_done
from hetero_scheduler.predict.training_data import DocumentSplit
from hetero_scheduler.trace import Trace

Steps = npt.NDArray[np.int64]
"""Numbers of steps of a trace."""
MOST_POOLED = 32_768
"""Steps over which the pool is solved: it has two numbers a layer to learn."""
_SOLVER_STEPS = 40
_FIRST_STD = 0.1
"""Of the embedding when learning begins."""


@dataclass(frozen=True)
class RefinementOptions:
    """How the token's part is learned. With `minutes` unset, the same seed gives the same weights."""

    rank: int = 64
    """Numbers kept of a token."""
    seed: int = 0
    epochs: int = 8
    """At most."""
    minutes: float | None = None
    """After these no epoch starts. None: only epochs and patience end it."""
    patience: int = 2
    """Epochs without a better validation loss after which it ends."""
    batch: int = 512
    learning_rate: float = 5e-3
    weight_decay: float = 1e-4
    """On the embedding: a token that is met seldom moves forecasts little."""


class RefinementProgress(NamedTuple):
    """One epoch is over. Losses: nats of divergence, mean over layers."""

    epoch: int
    epochs: int
    validation_loss: float
    best_loss: float
    first_loss: float
    """Of forecasts that are not refined."""


@torch.no_grad()
def one_step_shares(models: Sequence[GroupModel], trace: Trace) -> npt.NDArray[np.float16]:
    """What `models` expect of each step when they have seen the one before it. `[T, L, E]`

    A document's first step has no forecast: its shares are even.
    """
    shares = np.full(trace.logits.shape, 1 / trace.num_experts, dtype=np.float16)
    documents = list(zip(trace.bounds[:-1].tolist(), trace.bounds[1:].tolist(), strict=True))
    first = 0
    for model in models:
        span = slice(first, first + model.shape.num_layers)
        device = next(model.parameters()).device
        for begin, end in documents:
            logits = torch.from_numpy(trace.logits[begin:end, span]).to(device)
            chosen = torch.from_numpy(trace.topk[begin:end, span].astype(np.int64)).to(device)
            said, _ = model(activation_state(logits, chosen)[None], model.initial_state(1))
            shares[begin + 1 : end, span] = torch.softmax(said[0, :-1], dim=-1).half().cpu().numpy()
        first = span.stop
    return shares


def train_refinement(
    trace: Trace,
    shares: npt.NDArray[np.float16],
    *,
    split: DocumentSplit,
    options: RefinementOptions,
    device: str = "cpu",
    progress: Callable[[RefinementProgress], None] | None = None,
) -> Refinement:
    """Learn on the documents `split.train`; `shares` as `one_step_shares` gives them.

    Leaves torch's global random state as it was.
    """
    lesson = _Lesson.of(trace, shares, device)
    train, validation = _steps(trace, split.train), _steps(trace, split.validation)
    with torch.random.fork_rng(devices=[device] if device == "cuda" else []):
        torch.manual_seed(options.seed)
        # a token past the last one that training met is treated as one that it never met
        num_tokens = int(trace.tokens.max()) + 1
        part = _TokenPart(num_tokens, trace.num_layers, trace.num_experts, options.rank).to(device)
        _learn(part, lesson, train=train, validation=validation, options=options, progress=progress)
    return Refinement(
        scale=_array(part.scale),
        embedding=_array(part.embedding.weight),
        head=_array(part.head.weight).reshape(trace.num_layers, trace.num_experts, options.rank),
        bias=_array(part.head.bias).reshape(trace.num_layers, trace.num_experts),
        pool=None if trace.early is None else _solve_pool(part, lesson, train, trace.early),
    )


class _TokenPart(nn.Module):
    def __init__(self, num_tokens: int, num_layers: int, num_experts: int, rank: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(num_layers))
        self.embedding = nn.Embedding(num_tokens, rank)
        self.head = nn.Linear(rank, num_layers * num_experts)
        nn.init.zeros_(self.embedding.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, logs: Tensor, tokens: Tensor) -> Tensor:
        """Logits `[steps, L, E]` from the logarithms of shares and the token of each step."""
        learned: Tensor = self.head(self.embedding(tokens)).reshape(logs.shape)
        return self.scale[:, None] * logs + learned


class _Lesson(NamedTuple):
    """Arrays of all steps, on the host; a batch of them goes to `device`."""

    trace: Trace
    shares: npt.NDArray[np.float16]
    device: str

    @classmethod
    def of(cls, trace: Trace, shares: npt.NDArray[np.float16], device: str) -> _Lesson:
        if shares.shape != trace.logits.shape:
            raise ValueError(f"shares {shares.shape} are not of a trace of {trace.logits.shape}")
        return cls(trace, shares, device)

    def logs(self, steps: npt.NDArray[np.int64]) -> Tensor:
        """Logarithms of the forecasts' shares. `[steps, L, E]`"""
        shares = torch.from_numpy(self.shares[steps]).to(self.device)
        return shares.float().clamp_min(float(SMALLEST)).log()

    def tokens(self, steps: npt.NDArray[np.int64]) -> Tensor:
        """`[steps]`"""
        return torch.from_numpy(self.trace.tokens[steps].astype(np.int64)).to(self.device)

    def truth(self, steps: npt.NDArray[np.int64]) -> Tensor:
        """Activation states. `[steps, L, E]`"""
        logits = torch.from_numpy(self.trace.logits[steps]).to(self.device)
        chosen = torch.from_numpy(self.trace.topk[steps].astype(np.int64)).to(self.device)
        return activation_state(logits, chosen)


def _learn(
    part: _TokenPart,
    lesson: _Lesson,
    *,
    train: Steps,
    validation: Steps,
    options: RefinementOptions,
    progress: Callable[[RefinementProgress], None] | None,
) -> None:
    """Leave in `part` the weights that did best on the validation steps; at first it refines nothing."""
    best = _copied(part)
    first_loss = best_loss = _mean_loss(part, lesson, validation, options.batch)
    nn.init.normal_(part.embedding.weight, std=_FIRST_STD)
    optimizer = torch.optim.AdamW(
        [
            {"params": part.embedding.parameters(), "weight_decay": options.weight_decay},
            {"params": [part.scale, *part.head.parameters()], "weight_decay": 0.0},
        ],
        lr=options.learning_rate,
    )
    order, age, started = np.random.default_rng(options.seed), 0, time.monotonic()
    for epoch in range(options.epochs):
        done = share_done(epoch, started, epochs=options.epochs, minutes=options.minutes)
        if done >= 1.0 or age >= options.patience:
            break
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * (1 - done)
        _epoch(part, lesson, optimizer, _batches(order.permutation(train), options.batch))
        validation_loss, age = _mean_loss(part, lesson, validation, options.batch), age + 1
        if validation_loss < best_loss:
            best_loss, best, age = validation_loss, _copied(part), 0
        if progress is not None:
            losses = (validation_loss, best_loss, first_loss)
            progress(RefinementProgress(epoch + 1, options.epochs, *losses))
    part.load_state_dict(best)


def _epoch(
    part: _TokenPart, lesson: _Lesson, optimizer: torch.optim.Optimizer, batches: Iterator[Steps]
) -> None:
    for steps in batches:
        loss = divergence_loss(part(lesson.logs(steps), lesson.tokens(steps)), lesson.truth(steps)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def _mean_loss(part: _TokenPart, lesson: _Lesson, steps: Steps, batch: int) -> float:
    losses = [
        divergence_loss(part(lesson.logs(few), lesson.tokens(few)), lesson.truth(few))
        for few in _batches(steps, batch)
    ]
    return float(torch.cat(losses).mean())


def _solve_pool(part: _TokenPart, lesson: _Lesson, train: Steps, early: npt.NDArray[np.float16]) -> Shares:
    """The two exponents of each layer. `[L, 2]`"""
    steps = train[:: max(1, len(train) // MOST_POOLED)]
    pool = torch.tensor([1.0, 0.0], device=lesson.device).repeat(lesson.trace.num_layers, 1).requires_grad_()
    with torch.no_grad():
        forecast = torch.log_softmax(part(lesson.logs(steps), lesson.tokens(steps)), dim=-1)
        said = torch.log_softmax(torch.from_numpy(early[steps]).to(lesson.device).float(), dim=-1)
        truth = lesson.truth(steps)
    solver = torch.optim.LBFGS([pool], max_iter=_SOLVER_STEPS, line_search_fn="strong_wolfe")

    def loss() -> float:
        solver.zero_grad()
        mean = divergence_loss(pool[:, :1] * forecast + pool[:, 1:] * said, truth).mean()
        mean.backward()
        return float(mean.detach())

    solver.step(loss)
    return _array(pool)


def _steps(trace: Trace, documents: npt.NDArray[np.int64]) -> Steps:
    """Steps of `documents` that have a forecast: all but each document's first."""
    spans = [np.arange(trace.bounds[document] + 1, trace.bounds[document + 1]) for document in documents]
    return np.concatenate(spans)


def _batches(steps: Steps, batch: int) -> Iterator[Steps]:
    for begin in range(0, len(steps), batch):
        yield steps[begin : begin + batch]


def _copied(part: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in part.state_dict().items()}


def _array(tensor: Tensor) -> Shares:
    array: Shares = tensor.detach().float().cpu().numpy()
    return array
