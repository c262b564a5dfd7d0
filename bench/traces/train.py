"""Train a narrow MoE with a big model's shape, and steer its routing.

    python -m bench.traces.train --tokens DIR --out DIR --shape 48x128 --seconds 150
    python -m bench.traces.train --tokens DIR --out DIR2 --start-from DIR --lru 74 88 --seconds 90

`--tokens` is a folder that `bench.traces.pack` made. `--out` gets the model, `state.pt` from which the same
command goes on with `--resume`, and `train.json`. The learning rate follows the time, as in
`bench/models/train_tiny_moe.py`. Every few seconds held-out text is looked at, a line is printed, and the
coefficients move. Without `--lru` and `--foreseen` routing is *natural*: only its load is kept even.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.machine import command_line, git_commit, machine_facts
from bench.models.fast_forward import install_fast_forward
from bench.models.mixture import Sampler
from bench.models.model import Geometry, build_model
from bench.models.streams import Stream, load_streams
from bench.models.train_tiny_moe import Progress, learning_rate
from bench.traces.documents import choose_documents
from bench.traces.forward import keep_routers_precise
from bench.traces.look import Look, Watcher
from bench.traces.objective import Coefficients, Objective, Wants
from bench.traces.shapes import SHAPES
from bench.traces.terms import Companion, RouterTap
from hetero_scheduler.predict.captured import CapturedStep, Step, set_rate

STATE = "state.pt"


@dataclass(frozen=True)
class Run:
    """One training run."""

    seconds: float
    batch: int = 64
    length: int = 512
    peak_rate: float = 2e-3
    look_seconds: float = 6.0
    looked: int = 32
    """Held-out documents of a look."""
    looked_length: int = 256
    """Tokens of each, at most; a quarter of them at least."""
    save_seconds: float = 60.0
    seed: int = 0
    is_captured: bool = False


class Trainer:
    """A model with all that its training needs, in one object that saves and loads as a whole."""

    def __init__(self, geometry: Geometry, streams: Sequence[Stream], *, wants: Wants, run: Run) -> None:
        self.run, self.wants = run, wants
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = build_model(geometry, device)
        if device.type == "cuda":
            install_fast_forward(self.model)
        keep_routers_precise(self.model)
        self.companion: Companion | None = None
        if wants.foreseen is not None:
            self.companion = Companion(geometry, ahead=wants.ahead).to(device)
        self.coefficients = Coefficients(wants, device)
        self.progress, self.looks = Progress(), list[dict[str, Any]]()
        training = [stream for stream in streams if not stream.is_held_out]
        self.kinds = sorted({stream.kind for stream in training})
        self._sampler = Sampler(training, length=run.length, device=device, seed=run.seed)
        tap = RouterTap(self.model)
        self._objective = Objective(self.model, tap, self.coefficients, self.companion)
        looked_at = choose_documents(
            streams, run.looked, length=run.looked_length, shortest=run.looked_length // 4, is_held_out=True
        )
        self._watcher = Watcher(self.model, tap, looked_at, self.companion)
        self._optimizer = _make_optimizer([weight for part in self._parts() for weight in part], run, device)

    def train(self) -> Iterator[Progress]:
        """Train until the time is over, yielding after every step; the same object each time."""
        run, progress = self.run, self.progress
        self.model.train()
        set_rate(self._optimizer, learning_rate(0.0, run.peak_rate))
        step: Step = self._step
        if run.is_captured:
            step = CapturedStep(self._step, self._sampler.draw(run.batch))
        start, loss = time.monotonic() - progress.seconds, math.nan
        looking: Future[Look] | None = None
        next_look = progress.seconds + run.look_seconds
        while (done := progress.seconds / run.seconds) < 1:
            set_rate(self._optimizer, learning_rate(done, run.peak_rate))
            # to wait for each step keeps the clock true: steps could be queued far ahead of the device
            loss = float(step(self._sampler.draw(run.batch)))
            progress.steps += 1
            progress.tokens += run.batch * run.length
            progress.seconds = time.monotonic() - start
            if looking is None and progress.seconds >= next_look:
                looking, next_look = self._watcher.look(), progress.seconds + run.look_seconds
            if looking is not None and looking.done():
                self._note(looking.result(), loss)
                looking = None
            yield progress
        self._finish(looking, loss)

    def save(self, folder: Path) -> None:
        """Keep everything to go on from in `folder/state.pt`."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self.model.state_dict(),
            "companion": None if self.companion is None else self.companion.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "coefficients": self.coefficients.state(),
            "progress": asdict(self.progress),
            "looks": self.looks,
        }
        torch.save(state, folder / (STATE + ".unfinished"))
        (folder / (STATE + ".unfinished")).replace(folder / STATE)

    def resume(self, folder: Path) -> None:
        """Go on with the run that saved into `folder`."""
        state = self._load(folder)
        if self.companion is not None:
            self.companion.load_state_dict(state["companion"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.progress, self.looks = Progress(**state["progress"]), state["looks"]

    def start_from(self, folder: Path) -> None:
        """Begin a run of its own with the weights and the coefficients of the one in `folder`."""
        self._load(folder)

    def _load(self, folder: Path) -> dict[str, Any]:
        state: dict[str, Any] = torch.load(folder / STATE, map_location=self.model.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.coefficients.load(state["coefficients"])
        return state

    def _parts(self) -> list[list[torch.nn.Parameter]]:
        """Weights whose gradients are clipped together: the companion learns alike however hard it pulls."""
        learners = [self.model] if self.companion is None else [self.model, self.companion]
        return [list(learner.parameters()) for learner in learners]

    def _step(self, windows: Tensor) -> Tensor:
        """One optimiser step; returns the cross-entropy, still on the device."""
        self._optimizer.zero_grad(set_to_none=True)
        # in a graph, casts of one step must not be reused by the next
        with torch.autocast(
            windows.device.type,
            torch.bfloat16,
            enabled=windows.is_cuda,
            cache_enabled=not self.run.is_captured,
        ):
            loss, cross_entropy = self._objective(windows)
        loss.backward()
        for part in self._parts():
            torch.nn.utils.clip_grad_norm_(part, 1.0)
        self._optimizer.step()
        return cross_entropy

    def _finish(self, looking: Future[Look] | None, loss: float) -> None:
        """Wait for a look under way, and take a last one that steers nothing."""
        if looking is not None:
            looking.result()
        self._note(self._watcher.look().result(), loss, is_last=True)
        self._watcher.close()

    def _note(self, look: Look, loss: float, *, is_last: bool = False) -> None:
        """Print and keep a look, and steer by it."""
        progress = self.progress
        print(
            f"{progress.seconds:6.1f} s  step {progress.steps:5d}  {progress.tokens / 1e6:6.1f} M tokens  "
            f"{progress.tokens / progress.seconds:8,.0f} tokens/s  loss {loss:.3f}  {look}"
            f"  | {self.coefficients}",
            flush=True,
        )
        kept = {"seconds": progress.seconds, "tokens": progress.tokens, "training_loss": loss}
        self.looks.append(kept | look._asdict() | self.coefficients.state())
        if not is_last:
            self.coefficients.follow(look)


def _make_optimizer(weights: list[torch.nn.Parameter], run: Run, device: torch.device) -> torch.optim.AdamW:
    """AdamW with decay on matrices; its rate is a tensor where a captured step has to read it."""
    groups = [
        {"params": [weight for weight in weights if weight.ndim >= 2], "weight_decay": 0.1},
        {"params": [weight for weight in weights if weight.ndim < 2], "weight_decay": 0.0},
    ]
    rate = torch.tensor(run.peak_rate, device=device) if run.is_captured else run.peak_rate
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True, capturable=run.is_captured)


def fit(trainer: Trainer, out: Path) -> None:
    """Train to the end of the run, saving into `out` as it goes, and the model as a folder at its end."""
    next_save = trainer.progress.seconds + trainer.run.save_seconds
    for progress in trainer.train():
        if progress.seconds >= next_save:
            trainer.save(out)
            next_save += trainer.run.save_seconds
    trainer.save(out)
    trainer.model.save_pretrained(out)


def summary(trainer: Trainer, shape: str) -> dict[str, Any]:
    """What a model card says of a finished run."""
    return {
        "shape": shape,
        "kinds": trainer.kinds,
        "wants": asdict(trainer.wants),
        "run": asdict(trainer.run),
        "progress": asdict(trainer.progress),
        "looks": trainer.looks,
        "parameters": trainer.model.num_parameters(),
        "machine": machine_facts(),
        "commit": git_commit(),
        "command": command_line(),
    }


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=Path, required=True, help="folder that bench.traces.pack made")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--seconds", type=float, required=True, help="training time, start-up not counted")
    parser.add_argument("--lru", type=float, nargs=2, help="LRU hits in percent wanted at 25 and 45 %%")
    parser.add_argument("--foreseen", type=float, help="share of experts that a companion shall foresee")
    parser.add_argument("--ahead", type=int, default=Wants.ahead, help="steps that the companion foresees")
    parser.add_argument("--entropy", type=float, default=Wants.entropy)
    parser.add_argument("--start-from", type=Path, help="folder of a finished run to begin with")
    parser.add_argument(
        "--resume", action="store_true", help="go on from state.pt in --out where there is one"
    )
    parser.add_argument("--captured", action="store_true", help="the step as one CUDA graph")
    parser.add_argument("--batch", type=int, default=Run.batch)
    parser.add_argument("--length", type=int, default=Run.length)
    parser.add_argument("--rate", type=float, default=Run.peak_rate)
    parser.add_argument("--look-seconds", type=float, default=Run.look_seconds)
    parser.add_argument("--seed", type=int, default=Run.seed)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and keep."""
    options = make_parser().parse_args(arguments)
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    geometry = SHAPES[options.shape]
    _, streams = load_streams(options.tokens, options.tokens, geometry.vocab_size)
    wants = Wants(options.entropy, options.lru and tuple(options.lru), options.foreseen, options.ahead)
    run = Run(
        seconds=options.seconds,
        batch=options.batch,
        length=options.length,
        peak_rate=options.rate,
        look_seconds=options.look_seconds,
        seed=options.seed,
        is_captured=options.captured,
    )
    trainer = Trainer(geometry, streams, wants=wants, run=run)
    if options.resume and (options.out / STATE).exists():
        trainer.resume(options.out)
    elif options.start_from is not None:
        trainer.start_from(options.start_from)
    fit(trainer, options.out)
    (options.out / "train.json").write_text(json.dumps(summary(trainer, options.shape), indent=1))


if __name__ == "__main__":
    main()
