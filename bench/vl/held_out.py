"""The trained model, and questions about pictures that it never was trained on, for benches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from bench.vl.drawing import draw_picture
from bench.vl.questions import KINDS, Kind, Question, ask
from bench.vl.scenes import Split, draw_scene
from bench.vl.train import HELD_OUT_SEED

MODEL = Path(__file__).resolve().parent / "model"
"""What `bench.vl.train` made; `MODEL_CARD.md` in it says how well it does."""
MEASURED: tuple[Kind, ...] = tuple(kind for kind in KINDS if kind != "list")
"""Kinds that accuracy is told by."""


class Asked(NamedTuple):
    """A picture and what is asked about it."""

    image: Image.Image
    question: Question

    @property
    def messages(self) -> list[dict[str, Any]]:
        """For `Engine.generate`."""
        parts = [{"type": "image", "image": self.image}, {"type": "text", "text": self.question.text}]
        return [{"role": "user", "content": parts}]


def ask_each(kind: Kind, number: int, *, split: Split = "seeds") -> list[Asked]:
    """`number` questions of one kind, one a picture. The same arguments give the same ones."""
    asked = (_asked(split, index, kind) for index in count())
    return [each for each, _ in zip(_there(asked), range(number), strict=False)]


def pairs(number: int) -> list[tuple[Image.Image, str]]:
    """`number` (image, question) pairs, the measured kinds in turn: `--pairs bench.vl.held_out:pairs`."""
    of_kinds = [iter(ask_each(kind, -(-number // len(MEASURED)))) for kind in MEASURED]
    in_turn = [next(of_kinds[place % len(MEASURED)]) for place in range(number)]
    return [(each.image, each.question.text) for each in in_turn]


def _asked(split: Split, index: int, kind: Kind) -> Asked | None:
    scene = draw_scene(split, seed=HELD_OUT_SEED, index=index)
    question = ask(scene, np.random.default_rng([HELD_OUT_SEED, index, KINDS.index(kind)]), kind)
    return None if question is None else Asked(Image.fromarray(draw_picture(scene).pixels), question)


def _there(asked: Iterator[Asked | None]) -> Iterator[Asked]:
    """A scene may offer no question of a kind."""
    return (each for each in asked if each is not None)
