"""Training in time: steps until the clock says stop, on pictures that are still being drawn."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from bench.models.fast_forward import install_fast_forward
from bench.models.train_tiny_moe import learning_rate
from bench.vl.batches import DeviceBatches
from bench.vl.forward import BatchForward
from bench.vl.geometry import Geometry, build_model
from bench.vl.objective import Losses, Objective
from bench.vl.pool import PicturePool
from bench.vl.text import prefix_ids

_LOG_STEPS = 50
_FIRST_CHUNKS = 32
_FETCHED_AT_ONCE = 4


@dataclass(frozen=True)
class Run:
    """One training run."""

    seconds: float
    """Wall time of everything."""
    reserved_s: float = 15.0
    """Of it for evaluation, card and saving."""
    batch: int = 128
    peak_rate: float = 1.5e-3
    balance: float = 0.02
    chunks: int = 1024
    """Training pictures, in chunks of 128."""
    held_chunks: int = 16
    """Pictures of each held-out split."""
    processes: int = 13
    save_seconds: float = 35.0
    seed: int = 0


@dataclass
class Progress:
    """How far a run has come. `seconds`: of training alone."""

    steps: int = 0
    pictures: int = 0
    distinct_pictures: int = 0
    seconds: float = 0.0


class Trainer:
    """A model with all that its training needs."""

    def __init__(self, geometry: Geometry, tokenizer: Tokenizer, *, pool: PicturePool, run: Run) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.run, self.tokenizer, self.progress = run, tokenizer, Progress()
        self.model = build_model(geometry, tokenizer, device)
        if device.type == "cuda":
            install_fast_forward(self.model)
        forward = BatchForward(self.model, prefix_ids(tokenizer))
        self.objective = Objective(self.model, forward, balance=run.balance)
        self._pool, self._batches = pool, DeviceBatches(pool, device, seed=run.seed)
        self._weights = [*self.model.parameters(), *self.objective.parameters()]
        self._optimizer = _make_optimizer(self._weights, run.peak_rate)

    def train(self, until: float) -> Iterator[Progress]:
        """Train until the monotonic clock says `until`; yields the same object after every step."""
        self._pool.wait(min(_FIRST_CHUNKS, self.run.chunks))
        self._batches.fetch(_FIRST_CHUNKS)
        start = time.monotonic()
        while (now := time.monotonic()) < until:
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate((now - start) / (until - start), self.run.peak_rate)
            self.model.train()
            losses = self._step()
            self._batches.fetch(_FETCHED_AT_ONCE)
            self.progress.steps += 1
            self.progress.pictures += self.run.batch
            self.progress.distinct_pictures = self._batches.num_pictures
            self.progress.seconds = time.monotonic() - start
            if self.progress.steps % _LOG_STEPS == 0:
                self._log(losses)
            yield self.progress

    def _step(self) -> Losses:
        """One optimiser step; the losses are still on the device."""
        batch = self._batches.draw(self.run.batch)
        with torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.model.device.type == "cuda"):
            losses: Losses = self.objective(*batch)
        losses.total.backward()
        torch.nn.utils.clip_grad_norm_(self._weights, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return losses

    def _log(self, losses: Losses) -> None:
        progress = self.progress
        print(
            f"{progress.seconds:6.1f} s  step {progress.steps:5d}  {progress.pictures:8d} pictures "
            f"({progress.distinct_pictures} distinct)  {progress.pictures / progress.seconds:6.0f} /s"
            f"  answers {float(losses.answers):.3f}  cells {float(losses.cells):.3f}"
            f"  salience {float(losses.salience):.3f}",
            flush=True,
        )


def _make_optimizer(weights: Sequence[Tensor], rate: float) -> torch.optim.AdamW:
    """AdamW with decay on matrices."""
    groups = [
        {"params": [weight for weight in weights if weight.ndim >= 2], "weight_decay": 0.1},
        {"params": [weight for weight in weights if weight.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)
