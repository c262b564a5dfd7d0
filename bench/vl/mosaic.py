"""Pictures of many scenes: prompts with as many image tokens as photographs give."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from bench.vl.drawing import draw_picture
from bench.vl.questions import ask
from bench.vl.scenes import Split, draw_scene
from bench.vl.train import HELD_OUT_SEED

QUESTION = "What do you see?"
_TRAIN_SEED = 0


class Mosaic(NamedTuple):
    """`answer`: what the model was trained to say of each scene alone, row by row."""

    image: Image.Image
    answer: str

    @property
    def asked(self) -> list[dict[str, Any]]:
        """For `Engine.generate`."""
        parts = [{"type": "image", "image": self.image}, {"type": "text", "text": QUESTION}]
        return [{"role": "user", "content": parts}]

    @property
    def answered(self) -> list[dict[str, Any]]:
        """For `calibrate lookahead`."""
        return [*self.asked, {"role": "assistant", "content": self.answer}]


def draw_mosaics(number: int, *, side: int, wider: int, split: Split) -> list[Mosaic]:
    """`number` pictures of `side` by `side` scenes that no two share, 144 image tokens each. `wider`: pixels
    a side for each pixel of a scene. The same arguments give the same ones."""
    return [_draw(index, side=side, wider=wider, split=split) for index in range(number)]


def _draw(index: int, *, side: int, wider: int, split: Split) -> Mosaic:
    seed = _TRAIN_SEED if split == "train" else HELD_OUT_SEED
    numbers = range(index * side**2, (index + 1) * side**2)
    scenes = [draw_scene(split, seed=seed, index=number) for number in numbers]
    pixels = np.stack([draw_picture(scene).pixels for scene in scenes])
    tiles = pixels.reshape(side, side, *pixels.shape[1:]).swapaxes(1, 2)
    picture = tiles.reshape(side * tiles.shape[1], side * tiles.shape[3], 3)
    draw = np.random.default_rng([seed, index])
    asked = (ask(scene, draw, "list") for scene in scenes)
    answer = ", ".join(question.answer for question in asked if question is not None)
    return Mosaic(Image.fromarray(picture.repeat(wider, axis=0).repeat(wider, axis=1)), answer)
