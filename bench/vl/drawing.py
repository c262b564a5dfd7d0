"""A scene as pixels, and what each visual token lies on.

picture 192 × 192  =  12 × 12 cells of 16 × 16 pixels, one visual token each (2 × 2 patches of 8 × 8)
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from bench.vl.scenes import COLOURS, SHAPES, SIZE, Plate, Scene, Thing

CELL = 16
GRID = SIZE // CELL
NUM_CELLS = GRID * GRID
NUM_COLOURS = 1 + len(COLOURS)
NUM_FORMS = 1 + len(SHAPES) + 10
NUM_CENTRES = 2
_LEAST_COVER = 0.15
_GLYPHS = {
    "0": "01110 10001 10011 10101 11001 10001 01110",
    "1": "00100 01100 00100 00100 00100 00100 01110",
    "2": "01110 10001 00001 00110 01000 10000 11111",
    "3": "11110 00001 00001 01110 00001 00001 11110",
    "4": "00010 00110 01010 10010 11111 00010 00010",
    "5": "11111 10000 11110 00001 00001 10001 01110",
    "6": "00110 01000 10000 11110 10001 10001 01110",
    "7": "11111 00001 00010 00100 01000 01000 01000",
    "8": "01110 10001 10001 01110 10001 10001 01110",
    "9": "01110 10001 10001 01111 00001 00010 01100",
}
_NUM_LINES = 6


class Picture(NamedTuple):
    """A drawn scene."""

    pixels: npt.NDArray[np.uint8]  # [192, 192, 3]
    cells: npt.NDArray[np.uint8]
    """`[144, 3]`: colour (0: none), form (0: none, shapes, then digits), whether a middle lies there."""


def draw_picture(scene: Scene) -> Picture:
    """Background, clutter, shapes and plate; the same scene gives the same pixels."""
    image = _background(np.random.default_rng(scene.seed))
    owners = Image.new("L", image.size)
    brush, marker = ImageDraw.Draw(image), ImageDraw.Draw(owners)
    marks: list[tuple[int, int, tuple[int, int]]] = []
    for thing in scene.things:
        marks.append(
            (1 + list(COLOURS).index(thing.colour), 1 + SHAPES.index(thing.shape), (thing.x, thing.y))
        )
        _draw_thing(brush, thing, fill=COLOURS[thing.colour])
        _draw_thing(marker, thing, fill=(len(marks),))
    if scene.plate is not None:
        marks += _draw_plate(brush, marker, scene.plate, first=len(marks) + 1)
    return Picture(np.asarray(image), _cells(np.asarray(owners), marks))


def _background(draw: np.random.Generator) -> Image.Image:
    """Soft stains of little colour, grain, and thin grey lines."""
    base = draw.integers(50, 150) + draw.integers(-25, 26, size=(5, 5, 1)) + draw.integers(-12, 13, (5, 5, 3))
    stains = Image.fromarray(base.clip(0, 255).astype(np.uint8)).resize(
        (SIZE, SIZE), Image.Resampling.BILINEAR
    )
    brush = ImageDraw.Draw(stains)
    for ends in draw.integers(SIZE, size=(_NUM_LINES, 4)).tolist():
        brush.line(ends, fill=(int(draw.integers(40, 170)),) * 3, width=1)
    grain = draw.integers(-10, 11, size=(SIZE, SIZE, 1), dtype=np.int16)
    return Image.fromarray((np.asarray(stains) + grain).clip(0, 255).astype(np.uint8))


def _draw_thing(brush: ImageDraw.ImageDraw, thing: Thing, *, fill: tuple[int, ...]) -> None:
    x, y, r = thing.x, thing.y, thing.radius
    colour = fill if len(fill) == 3 else fill[0]
    if thing.shape == "circle":
        brush.ellipse((x - r, y - r, x + r, y + r), fill=colour)
    elif thing.shape == "ring":
        brush.ellipse((x - r, y - r, x + r, y + r), outline=colour, width=max(4, r // 3))
    elif thing.shape == "square":
        side = round(0.85 * r)
        brush.rectangle((x - side, y - side, x + side, y + side), fill=colour)
    elif thing.shape == "cross":
        arm = r // 3
        brush.rectangle((x - r, y - arm, x + r, y + arm), fill=colour)
        brush.rectangle((x - arm, y - r, x + arm, y + r), fill=colour)
    else:
        points, inner = (3, 1.0) if thing.shape == "triangle" else (5, 0.42)
        brush.polygon(_rays(thing, points, inner), fill=colour)


def _rays(thing: Thing, points: int, inner: float) -> list[tuple[float, float]]:
    """Corners on the circle around a thing, the first one up; between them those at `inner` of its radius."""
    corners = []
    for step in range(2 * points):
        if step % 2 and inner == 1.0:
            continue
        radius = thing.radius * (inner if step % 2 else 1.0)
        angle = math.pi * (step / points - 0.5)
        corners.append((thing.x + radius * math.cos(angle), thing.y + radius * math.sin(angle)))
    return corners


def _draw_plate(
    brush: ImageDraw.ImageDraw, marker: ImageDraw.ImageDraw, plate: Plate, *, first: int
) -> list[tuple[int, int, tuple[int, int]]]:
    """White dots on a black plate; returns colour, form and middle of each digit."""
    brush.rectangle(
        (plate.x, plate.y, plate.x + plate.width - 1, plate.y + plate.height - 1), fill=(15, 15, 15)
    )
    marks = []
    for place, digit in enumerate(plate.number):
        left, top = plate.x + (6 * place + 1) * plate.dot, plate.y + plate.dot
        box = (left, top, left + 5 * plate.dot - 1, top + 7 * plate.dot - 1)
        marker.rectangle(box, fill=first + place)
        marks.append((0, 1 + len(SHAPES) + int(digit), ((box[0] + box[2]) // 2, (box[1] + box[3]) // 2)))
        for row, dots in enumerate(_GLYPHS[digit].split()):
            for column, dot in enumerate(dots):
                if dot == "1":
                    x, y = left + column * plate.dot, top + row * plate.dot
                    brush.rectangle((x, y, x + plate.dot - 1, y + plate.dot - 1), fill=(250, 250, 250))
    return marks


def _cells(
    owners: npt.NDArray[np.uint8], marks: list[tuple[int, int, tuple[int, int]]]
) -> npt.NDArray[np.uint8]:
    """What covers most of each cell, where it covers a sixth of it or more; `owners` counts marks from 1."""
    blocks = owners.reshape(GRID, CELL, GRID, CELL).swapaxes(1, 2).reshape(NUM_CELLS, -1)
    cover = np.stack([(blocks == mark).mean(1) for mark in range(1, len(marks) + 1)] or [np.zeros(NUM_CELLS)])
    owner = np.where(cover.max(0) >= _LEAST_COVER, cover.argmax(0) + 1, 0)
    kinds = np.array([(0, 0), *((colour, form) for colour, form, _ in marks)], dtype=np.uint8)
    cells = np.zeros((NUM_CELLS, 3), dtype=np.uint8)
    cells[:, :2] = kinds[owner]
    for _, _, (x, y) in marks:
        cells[y // CELL * GRID + x // CELL, 2] = 1
    return cells
