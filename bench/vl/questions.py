"""Questions about a scene, with answers of one or few words.

    existence   Is there a red circle?                           yes, no       as POPE asks
    count       How many squares are there?                      0 to 6        as MME does
    colour      What colour is the star?                         red, ...
    position    Where is the red star? Is it left of the ...?    top left, ..., yes, no
    digits      What number is shown?                            472, none     as OCRBench does
    list        What do you see?                                 red star, blue ring, 472

The first five are what accuracy is measured by; the last one, whose answer is long, teaches and exercises
decoding.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeVar, get_args

import numpy as np

from bench.vl.scenes import COLOURS, HELD_OUT, SHAPES, SIZE, Scene, Thing

T = TypeVar("T")

Kind = Literal["existence", "count", "colour", "position", "digits", "list"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_BOUNDS = (0.22, 0.42, 0.58, 0.78, 0.9)
"""Shares of the kinds in training, added up; the last kind has the rest."""
_MIDDLE = 12
"""Pixels around the middle of the picture, and between two things, in which no side is asked for."""


class Question(NamedTuple):
    """What is asked, and the one right answer."""

    kind: Kind
    text: str
    answer: str


def ask(scene: Scene, draw: np.random.Generator, kind: Kind | None = None) -> Question | None:
    """A question about `scene`, of a kind drawn by the shares of training where none is given.

    None where the scene offers no question of that kind.
    """
    drawn = kind or KINDS[bisect(_BOUNDS, draw.random())]
    return _ASKERS[drawn](scene, draw)


def _existence(scene: Scene, draw: np.random.Generator) -> Question:
    """Half of the answers are no; of those, half name a colour and a shape that are there, but not together.

    Pairs that training never shows are not asked for in vain either: they would all be learnt as absent.
    """
    here = sorted({(thing.colour, thing.shape) for thing in scene.things})
    if here and draw.random() < 0.5:
        return _is_there(*_any(draw, here), "yes")
    is_new_allowed = any(pair in HELD_OUT for pair in here)
    is_near = bool(here) and draw.random() < 0.5
    while True:
        colour = _any(draw, here)[0] if is_near else _any(draw, tuple(COLOURS))
        pair = colour, _any(draw, here)[1] if is_near else _any(draw, SHAPES)
        if pair not in here and (is_new_allowed or pair not in HELD_OUT):
            return _is_there(*pair, "no")
        is_near = is_near and draw.random() < 0.7


def _any(draw: np.random.Generator, choices: Sequence[T]) -> T:
    return choices[int(draw.integers(len(choices)))]


def _is_there(colour: str, shape: str, answer: str) -> Question:
    article = "an" if colour[0] in "aeiou" else "a"
    return Question("existence", f"Is there {article} {colour} {shape}?", answer)


def _count(scene: Scene, draw: np.random.Generator) -> Question:
    """Of all, of a colour or of a shape; one in six asks for what is not there."""
    attribute = int(draw.integers(5))
    if attribute == 0:
        return Question("count", "How many objects are there?", str(len(scene.things)))
    is_shape = attribute > 2
    tally = Counter(thing.shape if is_shape else thing.colour for thing in scene.things)
    words = tuple(SHAPES if is_shape else COLOURS)
    word = _any(draw, words if draw.random() < 0.17 or not tally else sorted(tally))
    plural = f"{word}es" if word == "cross" else f"{word}s"
    asked = plural if is_shape else f"{word} objects"
    return Question("count", f"How many {asked} are there?", str(tally[word]))


def _colour(scene: Scene, draw: np.random.Generator) -> Question | None:
    """Of a thing whose shape no other has."""
    tally = Counter(thing.shape for thing in scene.things)
    single = [thing for thing in scene.things if tally[thing.shape] == 1]
    if not single:
        return None
    thing = _any(draw, single)
    return Question("colour", f"What colour is the {thing.shape}?", thing.colour)


def _position(scene: Scene, draw: np.random.Generator) -> Question | None:
    """In which quarter a thing lies, or on which side of another; both named so that none else is meant."""
    tally = Counter(thing.name for thing in scene.things)
    single = [
        scene.things[i] for i in draw.permutation(len(scene.things)) if tally[scene.things[i].name] == 1
    ]
    if len(single) > 1 and draw.random() < 0.5:
        return _side(single[0], single[1], is_row=bool(draw.random() < 0.5))
    for thing in single:
        off_x, off_y = thing.x - SIZE // 2, thing.y - SIZE // 2
        if min(abs(off_x), abs(off_y)) > _MIDDLE:
            quarter = f"{'top' if off_y < 0 else 'bottom'} {'left' if off_x < 0 else 'right'}"
            return Question("position", f"Where is the {thing.name}?", quarter)
    return None


def _side(one: Thing, other: Thing, *, is_row: bool) -> Question | None:
    offset = one.x - other.x if is_row else one.y - other.y
    if abs(offset) <= _MIDDLE:
        return None
    relation = "left of" if is_row else "above"
    text = f"Is the {one.name} {relation} the {other.name}?"
    return Question("position", text, "yes" if offset < 0 else "no")


def _digits(scene: Scene, draw: np.random.Generator) -> Question | None:
    """One in ten of the pictures without a plate are asked for their number too."""
    if scene.plate is None and draw.random() > 0.1:
        return None
    return Question("digits", "What number is shown?", scene.plate.number if scene.plate else "none")


def _list(scene: Scene, draw: np.random.Generator) -> Question | None:
    """Things from left to right, then the number."""
    names = [thing.name for thing in sorted(scene.things, key=lambda thing: (thing.x, thing.y))]
    names += [scene.plate.number] if scene.plate else []
    return Question("list", "What do you see?", ", ".join(names)) if names else None


_ASKERS: dict[Kind, Callable[[Scene, np.random.Generator], Question | None]] = {
    "existence": _existence,
    "count": _count,
    "colour": _colour,
    "position": _position,
    "digits": _digits,
    "list": _list,
}
