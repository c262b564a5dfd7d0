"""Ship a trained model: `python -m bench.models.publish TRAINED`.

Copies what a user needs from the output folder of `train_tiny_moe.py` into the package, and writes the
numbers of its training run to `bench/results/bundled_model.json`.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np

from bench.harness import RESULTS, ResultFile, Row
from bench.machine import ROOT
from bench.models.model_card import Summary, read_summary, write_card

BUNDLED = ROOT / "hetero_runtime" / "bundled" / "model"
SHIPPED = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
_REHEARSED = "1.76 (a rehearsal of four minutes, 88.6 M tokens, the same split)"


def publish(trained: Path, bundled: Path, results: Path) -> None:
    """Copy the model into `bundled`, which is emptied first, with its card; write its result file."""
    summary = read_summary(trained / "train.json")
    shutil.rmtree(bundled, ignore_errors=True)
    bundled.mkdir(parents=True)
    for pattern in SHIPPED:
        for path in sorted(trained.glob(pattern)):
            shutil.copyfile(path, bundled / path.name)
    write_card(summary, bundled / "MODEL_CARD.md")
    result = ResultFile(
        bench="bundled_model",
        commit=summary.commit,
        command=summary.command,
        machine=summary.machine,
        date=summary.date,
        rows=tuple(_rows(summary)),
    )
    result.save(results)
    result.print_table()


def _rows(summary: Summary) -> list[Row]:
    held = summary.held_out
    loss = "main.tiny_heldout_loss"
    mean = "mean over the kinds of the corpus, chat left out; bf16 weights as shipped"
    distinct = f"{summary.training_tokens} distinct; {summary.progress['seconds']:.0f} s of training"
    entropy = ", ".join(f"{value:.3f}" for value in held.load_entropy)
    worst = "largest load of one expert over the mean load, the worst over layers"
    mean_entropy = float(np.mean(held.load_entropy))
    rows = [Row(id=loss, value=held.mean_loss, unit="nats/token", reference=_REHEARSED, note=mean)]
    for kind, value in held.loss.items():
        note = f"{held.tokens[kind]} held-out tokens"
        rows.append(Row(id=f"{loss}.{kind}", value=value, unit="nats/token", note=note))
    return [
        *rows,
        Row(id="main.tiny_tokens", value=summary.progress["tokens"], unit="tokens", note=distinct),
        Row(id="main.tiny_load_entropy", value=mean_entropy, unit="ratio", target=">=0.93", note=entropy),
        Row(id="main.tiny_worst_load", value=held.worst_load, unit="ratio", target="<=3.5", note=worst),
    ]


if __name__ == "__main__":
    publish(Path(sys.argv[1]), BUNDLED, RESULTS)
