"""The trained model, and questions about pictures that it never was trained on, for benches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor

from bench.vl.drawing import draw_picture
from bench.vl.pool import MAX_QUESTIONS, NO_KIND
from bench.vl.questions import KINDS, Kind, Question, ask
from bench.vl.scenes import Split, draw_scene
from bench.vl.text import RowWriter
from bench.vl.train import HELD_OUT_SEED

MODEL = Path(__file__).resolve().parent / "model"
"""What `bench.vl.train` made; `MODEL_CARD.md` in it says how well it does."""
MEASURED: tuple[Kind, ...] = tuple(kind for kind in KINDS if kind != "list")
"""Kinds that accuracy is told by."""
_QUESTIONS_A_KIND = 2


class HeldOut(NamedTuple):
    """Pictures, each with a row of questions: what `BatchForward` reads."""

    pictures: Tensor  # [pictures, 192, 192, 3] uint8
    rows: Tensor  # [pictures, 4, ROW_LENGTH] int64
    kinds: Tensor
    """`[pictures, MAX_QUESTIONS]` int64: place in KINDS of each question, NO_KIND after the last."""


class Asked(NamedTuple):
    """A picture and what is asked about it."""

    image: Image.Image
    question: Question

    @property
    def messages(self) -> list[dict[str, Any]]:
        """For `Engine.generate`."""
        parts = [{"type": "image", "image": self.image}, {"type": "text", "text": self.question.text}]
        return [{"role": "user", "content": parts}]


def ask_rows(number: int, tokenizer: Tokenizer, *, split: Split = "seeds") -> HeldOut:
    """`number` pictures with up to two questions of each measured kind, as many as a row has room for."""
    write = RowWriter(tokenizer).write
    pixels, rows, kinds = [], [], []
    for index in range(number):
        scene = draw_scene(split, seed=HELD_OUT_SEED, index=index)
        draw = np.random.default_rng([HELD_OUT_SEED, index])
        asked = (ask(scene, draw, kind) for _ in range(_QUESTIONS_A_KIND) for kind in MEASURED)
        row, kept = write(list(dict.fromkeys(each for each in asked if each is not None)))
        pixels.append(draw_picture(scene).pixels)
        rows.append(row)
        kinds.append([KINDS.index(each.kind) for each in kept] + [NO_KIND] * (MAX_QUESTIONS - len(kept)))
    return HeldOut(
        torch.from_numpy(np.stack(pixels)), torch.from_numpy(np.stack(rows)).long(), torch.tensor(kinds)
    )


def ask_each(kind: Kind, number: int, *, split: Split = "seeds") -> list[Asked]:
    """`number` questions of one kind, one a picture. The same arguments give the same ones."""
    asked = (_asked(split, index, kind) for index in count())
    return [each for each, _ in zip(_there(asked), range(number), strict=False)]


def pairs(number: int) -> list[tuple[Image.Image, str]]:
    """`number` (image, question) pairs, each of another picture, the measured kinds in turn."""
    found: list[Asked] = []
    indices = count()
    while len(found) < number:
        asked = _asked("seeds", next(indices), MEASURED[len(found) % len(MEASURED)])
        found += [] if asked is None else [asked]
    return [(each.image, each.question.text) for each in found]


def _asked(split: Split, index: int, kind: Kind) -> Asked | None:
    scene = draw_scene(split, seed=HELD_OUT_SEED, index=index)
    question = ask(scene, np.random.default_rng([HELD_OUT_SEED, index, KINDS.index(kind)]), kind)
    return None if question is None else Asked(Image.fromarray(draw_picture(scene).pixels), question)


def _there(asked: Iterator[Asked | None]) -> Iterator[Asked]:
    """A scene may offer no question of a kind."""
    return (each for each in asked if each is not None)
