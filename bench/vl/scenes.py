"""What is in a picture: coloured shapes, and on some pictures a plate with a number.

Six pairs of colour and shape are kept out of every training picture; pictures of the split `combinations`
have one of them each. A scene is a pure function of split, seed and index: training, evaluation and tests
never share one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

SIZE = 192
"""Pixels of a side."""
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 230),
    "yellow": (235, 215, 50),
    "purple": (150, 50, 190),
    "orange": (245, 140, 30),
    "cyan": (60, 210, 220),
    "white": (245, 245, 245),
}
SHAPES = ("circle", "square", "triangle", "cross", "star", "ring")
HELD_OUT = (
    ("red", "star"),
    ("green", "ring"),
    ("blue", "triangle"),
    ("yellow", "circle"),
    ("purple", "cross"),
    ("orange", "square"),
)
"""Pairs of colour and shape that no training picture shows."""
MAX_THINGS = 6
Split = Literal["train", "seeds", "combinations"]
"""`seeds`: as in training, from seeds never trained on; `combinations`: with a pair never trained on."""

_RADII = (11, 20)
_GAP = 4
_TRIES = 60
_PLATE_SHARE = 0.6


@dataclass(frozen=True)
class Thing:
    """A coloured shape: its centre and half of its extent, in pixels."""

    colour: str
    shape: str
    x: int
    y: int
    radius: int

    @property
    def name(self) -> str:
        """`red circle`."""
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True)
class Plate:
    """A number on a plate: its upper left corner, and pixels a dot of its glyphs (5 by 7 dots each)."""

    number: str
    x: int
    y: int
    dot: int

    @property
    def width(self) -> int:
        """Pixels, with a margin of one dot around the glyphs and one between them."""
        return (6 * len(self.number) + 1) * self.dot

    @property
    def height(self) -> int:
        """Pixels, margins included."""
        return 9 * self.dot


@dataclass(frozen=True)
class Scene:
    """A picture before it is drawn. `seed` decides its background."""

    things: tuple[Thing, ...]
    plate: Plate | None
    seed: int


def draw_scene(split: Split, *, seed: int, index: int) -> Scene:
    """The scene with that number in a split."""
    draw = np.random.default_rng([get_args(Split).index(split), seed, index])
    plate = _draw_plate(draw) if draw.random() < _PLATE_SHARE else None
    pairs = _draw_pairs(draw, split)
    things: list[Thing] = []
    for colour, shape in pairs:
        thing = _place(draw, colour, shape, things=things, plate=plate)
        if thing is not None:
            things.append(thing)
    return Scene(tuple(things), plate, int(draw.integers(1 << 31)))


def _draw_pairs(draw: np.random.Generator, split: Split) -> list[tuple[str, str]]:
    """Colours and shapes from a palette of the picture: a small one repeats itself, so counts are large."""
    num_things = int(draw.integers(1, MAX_THINGS + 1))
    colours = draw.permutation(list(COLOURS))[: int(draw.integers(1, 6))]
    shapes = draw.permutation(SHAPES)[: int(draw.integers(1, 5))]
    pairs: list[tuple[str, str]] = []
    if split == "combinations":
        pairs.append(HELD_OUT[int(draw.integers(len(HELD_OUT)))])
    for _ in range(_TRIES):
        if len(pairs) >= num_things:
            break
        pair = str(colours[draw.integers(len(colours))]), str(shapes[draw.integers(len(shapes))])
        if pair not in HELD_OUT:
            pairs.append(pair)
    return pairs


def _draw_plate(draw: np.random.Generator) -> Plate:
    number = str(int(draw.integers(10 ** int(draw.integers(1, 4)))))
    plate = Plate(number, 0, 0, int(draw.integers(3, 5)))
    x = int(draw.integers(SIZE - plate.width))
    y = int(draw.integers(SIZE - plate.height))
    return Plate(number, x, y, plate.dot)


def _place(
    draw: np.random.Generator, colour: str, shape: str, *, things: list[Thing], plate: Plate | None
) -> Thing | None:
    """Somewhere free; None where no place is found."""
    for _ in range(_TRIES):
        radius = int(draw.integers(_RADII[0], _RADII[1] + 1))
        x, y = (int(value) for value in draw.integers(radius + 1, SIZE - radius - 1, size=2))
        thing = Thing(colour, shape, x, y, radius)
        if not _covers_plate(thing, plate) and all(_is_apart(thing, other) for other in things):
            return thing
    return None


def _is_apart(one: Thing, other: Thing) -> bool:
    return math.hypot(one.x - other.x, one.y - other.y) > 1.2 * (one.radius + other.radius) + _GAP


def _covers_plate(thing: Thing, plate: Plate | None) -> bool:
    if plate is None:
        return False
    away_x = max(plate.x - thing.x, thing.x - plate.x - plate.width, 0)
    away_y = max(plate.y - thing.y, thing.y - plate.y - plate.height, 0)
    return max(away_x, away_y) < thing.radius + _GAP
