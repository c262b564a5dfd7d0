"""Train the small vision-language model: `python -m bench.vl.train --out DIR --seconds 150`.

All of it fits into `--seconds`, counted from the start of the process: drawing pictures, training, evaluation
and the model card. The learning rate follows the clock, as for the bundled model. The model is saved as it
would ship every now and then, so that a run that is ended early leaves one behind. `--parts DIR` gets the
folder once more, as a tar cut in three.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import psutil
import torch
from transformers import Qwen3VLMoeForConditionalGeneration

from bench.machine import command_line, git_commit, machine_facts
from bench.vl.evaluate import Report, evaluate
from bench.vl.geometry import Geometry
from bench.vl.model_card import Summary, write_card
from bench.vl.pool import CHUNK, PicturePool
from bench.vl.saving import as_shipped, save_model, write_parts
from bench.vl.scenes import Split
from bench.vl.text import make_tokenizer, prefix_ids
from bench.vl.trainer import Run, Trainer

HELD_OUT: tuple[Split, ...] = ("seeds", "combinations")
HELD_OUT_SEED = 1_000_003
_LOOKED_AT = 4
"""Chunks of held-out pictures."""
_OTHER_CORES = 3
"""For what launches kernels, and for drawing held-out pictures."""


class Keeper:
    """Saves and measures a trainer's model as it would ship."""

    def __init__(
        self, trainer: Trainer, held_out: Sequence[PicturePool], *, out: Path, parts: Path | None
    ) -> None:
        self._trainer, self._held_out, self._out, self._parts = trainer, held_out, out, parts

    def save(self) -> None:
        """Write the folder, and its parts where they are wanted."""
        save_model(self._shipped(), self._trainer.tokenizer, self._out)
        self._write_parts()

    def look(self) -> None:
        """Print how a few held-out questions are answered."""
        pool = self._held_out[0]
        print(f"  held out: {self._evaluate(pool, min(_LOOKED_AT, pool.num_chunks))}", flush=True)

    def finish(self, geometry: Geometry) -> Summary:
        """Save, evaluate on all held-out pictures, and write `train.json` and the card."""
        self.save()
        reports: dict[str, Report] = {
            pool.split: self._evaluate(pool, pool.num_chunks) for pool in self._held_out
        }
        for split, report in reports.items():
            print(f"{split}: {report}", flush=True)
        summary = Summary(
            geometry=asdict(geometry),
            run=asdict(self._trainer.run),
            progress=asdict(self._trainer.progress),
            held_out=reports,
            parameters=self._trainer.model.num_parameters(),
            machine=machine_facts(),
            commit=git_commit(),
            command=command_line(),
            date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        )
        (self._out / "train.json").write_text(json.dumps(asdict(summary), indent=1))
        write_card(summary, self._out / "MODEL_CARD.md")
        self._write_parts()
        return summary

    def _shipped(self) -> Qwen3VLMoeForConditionalGeneration:
        return as_shipped(self._trainer.model, self._trainer.tokenizer)

    def _evaluate(self, pool: PicturePool, num_chunks: int) -> Report:
        pool.wait(num_chunks)
        prefix = prefix_ids(self._trainer.tokenizer)
        return evaluate(self._shipped(), prefix, pool.drawn, num_pictures=num_chunks * CHUNK)

    def _write_parts(self) -> None:
        if self._parts is not None:
            write_parts(self._out, self._parts)


def train(geometry: Geometry, *, run: Run, out: Path, parts: Path | None, begun: float) -> Summary:
    """Make the model in `out`. `begun`: when the time of the run began, on the monotonic clock."""
    torch.manual_seed(run.seed)
    tokenizer = make_tokenizer()
    with ExitStack() as pools:
        pool = pools.enter_context(
            PicturePool("train", run.chunks, tokenizer=tokenizer, seed=run.seed, num_processes=run.processes)
        )
        held_out = [
            pools.enter_context(
                PicturePool(split, run.held_chunks, tokenizer=tokenizer, seed=HELD_OUT_SEED, num_processes=1)
            )
            for split in HELD_OUT
        ]
        trainer = Trainer(geometry, tokenizer, pool=pool, run=run)
        keeper = Keeper(trainer, held_out, out=out, parts=parts)
        next_save = 0.0  # the first save comes with the first step: what cannot be saved fails at once
        for progress in trainer.train(begun + run.seconds - run.reserved_s):
            if progress.seconds >= next_save:
                keeper.save()
                keeper.look()
                next_save += run.save_seconds
        return keeper.finish(geometry)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder that the model goes to")
    parser.add_argument("--parts", type=Path, help="folder for the same as a tar in three parts")
    parser.add_argument("--seconds", type=float, default=150.0, help="wall time of everything")
    parser.add_argument("--batch", type=int, default=Run.batch, help="pictures a step")
    parser.add_argument("--rate", type=float, default=Run.peak_rate, help="peak learning rate")
    parser.add_argument("--balance", type=float, default=Run.balance, help="weight of an even load")
    parser.add_argument("--chunks", type=int, default=Run.chunks, help="training pictures / 128")
    parser.add_argument("--seed", type=int, default=Run.seed)
    options = parser.parse_args(arguments)
    run = Run(
        seconds=options.seconds,
        batch=options.batch,
        peak_rate=options.rate,
        balance=options.balance,
        chunks=options.chunks,
        processes=max(1, len(os.sched_getaffinity(0)) - _OTHER_CORES),
        seed=options.seed,
    )
    begun = time.monotonic() - (time.time() - psutil.Process().create_time())
    train(Geometry(), run=run, out=options.out, parts=options.parts, begun=begun)


if __name__ == "__main__":
    main()
