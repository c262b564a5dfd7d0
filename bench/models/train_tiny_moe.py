"""Train the bundled model: `python -m bench.models.train_tiny_moe --corpus DIR --out DIR`.

The learning rate follows the wall clock, so a run of any length warms up, holds, and decays to zero at
its end. Every few minutes the model is saved as it would ship; the last save is the result. `--out` gets
the model folder with its card, and `train.json` with every number and sample that the card cites.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM

from bench.machine import command_line, git_commit, machine_facts
from bench.models.evaluate import evaluate
from bench.models.fast_forward import install_fast_forward
from bench.models.mixture import Sampler
from bench.models.model import Geometry, build_model, training_loss
from bench.models.model_card import Summary, write_card
from bench.models.samples import write_samples
from bench.models.saving import as_shipped, save_model
from bench.models.streams import Stream, load_streams
from bench.models.tokenizer import wrap_tokenizer

_WARM_UP, _DECAY = 0.02, 0.6
_LOG_STEPS = 100


@dataclass(frozen=True)
class Run:
    """One training run."""

    minutes: float
    batch: int = 128
    length: int = 512
    peak_rate: float = 2e-3
    save_minutes: float = 3.0
    seed: int = 0


@dataclass
class Progress:
    """How far a run has come."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0


def learning_rate(done: float, peak: float) -> float:
    """The rate when a share `done` (0 to 1) of the time is over: up in 2 %, flat to 40 %, down to zero."""
    return peak * min(1.0, (done + 1e-3) / _WARM_UP, max(0.0, 1.0 - done) / _DECAY)


def train(model: Qwen3MoeForCausalLM, sampler: Sampler, run: Run) -> Iterator[Progress]:
    """Train in place until the time is over, yielding after every step; the same object each time."""
    decayed = [weight for weight in model.parameters() if weight.ndim >= 2]
    plain = [weight for weight in model.parameters() if weight.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=run.peak_rate, betas=(0.9, 0.95), fused=True)
    progress, start = Progress(), time.monotonic()
    model.train()
    while (done := progress.seconds / (60 * run.minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(done, run.peak_rate)
        loss = _step(model, optimizer, sampler.draw(run.batch))
        progress.steps += 1
        progress.tokens += run.batch * run.length
        progress.seconds = time.monotonic() - start
        if progress.steps % _LOG_STEPS == 0:
            _log(progress, float(loss))
        yield progress


def _step(model: Qwen3MoeForCausalLM, optimizer: torch.optim.Optimizer, windows: Tensor) -> Tensor:
    """One optimiser step; returns the cross-entropy, still on the device."""
    with torch.autocast(windows.device.type, torch.bfloat16, enabled=windows.is_cuda):
        loss, cross_entropy = training_loss(model, windows)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return cross_entropy


def _log(progress: Progress, loss: float) -> None:
    speed = progress.tokens / progress.seconds
    print(
        f"{progress.seconds:6.1f} s  step {progress.steps:5d}  {progress.tokens / 1e6:7.1f} M tokens"
        f"  {speed:9.0f} tokens/s  loss {loss:.3f}",
        flush=True,
    )


def fit(
    model: Qwen3MoeForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    streams: list[Stream],
    *,
    run: Run,
    out: Path,
) -> Progress:
    """Train on the streams that are not held out, saving into `out` as the run goes and at its end."""
    training = [stream for stream in streams if not stream.is_held_out]
    sampler = Sampler(training, length=run.length, device=model.device, seed=run.seed)
    progress, next_save = Progress(), 60 * run.save_minutes
    for progress in train(model, sampler, run):
        if progress.seconds >= next_save:
            save_model(as_shipped(model, tokenizer), tokenizer, out)
            next_save += 60 * run.save_minutes
    save_model(as_shipped(model, tokenizer), tokenizer, out)
    return progress


def report(
    shipped: Qwen3MoeForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    streams: list[Stream],
    *,
    run: Run,
    progress: Progress,
) -> Summary:
    """Held-out loss, load and samples of a finished model, with the facts of the run that made it."""
    return Summary(
        run=asdict(run),
        progress=asdict(progress),
        held_out=evaluate(shipped, streams, length=run.length),
        parameters=shipped.num_parameters(),
        training_tokens=sum(len(stream.tokens) for stream in streams if not stream.is_held_out),
        machine=machine_facts(),
        commit=git_commit(),
        command=command_line(),
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        samples=write_samples(shipped, tokenizer, max_tokens=160, seed=run.seed),
    )


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line, train, evaluate, write the card."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True, help="folder of P.KIND.SOURCE.txt.xz")
    parser.add_argument("--cache", type=Path, help="folder of tokenised sources (default: CORPUS/tokens)")
    parser.add_argument("--out", type=Path, required=True, help="where the model goes")
    parser.add_argument("--minutes", type=float, default=8.0, help="training time, evaluation not counted")
    parser.add_argument("--batch", type=int, default=Run.batch, help="windows of 512 tokens a step")
    parser.add_argument("--rate", type=float, default=Run.peak_rate, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=Run.seed)
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    geometry = Geometry()
    run = Run(minutes=options.minutes, batch=options.batch, peak_rate=options.rate, seed=options.seed)
    raw, streams = load_streams(
        options.corpus, options.cache or options.corpus / "tokens", geometry.vocab_size
    )
    tokenizer = wrap_tokenizer(raw, geometry.max_length)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(geometry, device)
    if device.type == "cuda":
        install_fast_forward(model)
    progress = fit(model, tokenizer, streams, run=run, out=options.out)
    summary = report(as_shipped(model, tokenizer), tokenizer, streams, run=run, progress=progress)
    (options.out / "train.json").write_text(json.dumps(asdict(summary), indent=1))
    write_card(summary, options.out / "MODEL_CARD.md")


if __name__ == "__main__":
    main()
