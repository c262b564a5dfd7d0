"""Scenes, their pictures, and the questions about them: fixed by seed, true, and nothing held out leaks."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from bench.vl.drawing import CELL, GRID, draw_picture
from bench.vl.questions import KINDS, Kind, Question, ask
from bench.vl.scenes import COLOURS, HELD_OUT, SHAPES, SIZE, Plate, Scene, Thing, draw_scene

RED = Thing("red", "circle", x=40, y=40, radius=16)
BLUE = Thing("blue", "square", x=150, y=60, radius=16)
OTHER = Thing("blue", "cross", x=60, y=150, radius=14)
SCENE = Scene((RED, BLUE, OTHER), Plate("472", x=100, y=140, dot=3), seed=3)


def answers(kind: Kind, scene: Scene = SCENE) -> dict[str, str]:
    """Every question of a kind that comes up in many draws."""
    draw = np.random.default_rng(0)
    questions = [ask(scene, draw, kind) for _ in range(600)]
    return {question.text: question.answer for question in questions if question is not None}


def test_training_never_shows_what_is_held_out() -> None:
    for index in range(300):
        training, held = (draw_scene(split, seed=0, index=index) for split in ("train", "combinations"))
        assert not {(thing.colour, thing.shape) for thing in training.things} & set(HELD_OUT)
        assert sum((thing.colour, thing.shape) in HELD_OUT for thing in held.things) <= 1
        pairs = {pair for pair in HELD_OUT if pair in {(thing.colour, thing.shape) for thing in held.things}}
        assert pairs or len(held.things) == 0


def test_a_scene_depends_on_split_seed_and_index() -> None:
    scene = draw_scene("train", seed=1, index=7)
    assert scene == draw_scene("train", seed=1, index=7)
    others = [draw_scene("seeds", seed=1, index=7), draw_scene("train", seed=2, index=7)]
    assert scene not in [*others, draw_scene("train", seed=1, index=8)]


def test_things_lie_apart_and_inside() -> None:
    for index in range(200):
        things = draw_scene("train", seed=0, index=index).things
        for i, one in enumerate(things):
            assert one.radius < min(one.x, one.y, SIZE - one.x, SIZE - one.y)
            for other in things[:i]:
                assert np.hypot(one.x - other.x, one.y - other.y) > one.radius + other.radius


def test_pixels_and_cells_say_the_same() -> None:
    picture = draw_picture(SCENE)
    assert picture.pixels.shape == (SIZE, SIZE, 3)
    assert np.array_equal(picture.pixels, draw_picture(SCENE).pixels)
    for thing in (RED, BLUE, OTHER):
        assert tuple(picture.pixels[thing.y, thing.x]) == COLOURS[thing.colour]
        colour, form, is_middle = picture.cells[thing.y // CELL * GRID + thing.x // CELL]
        assert (colour, form) == (1 + list(COLOURS).index(thing.colour), 1 + SHAPES.index(thing.shape))
        assert is_middle
    assert picture.cells[:, 2].sum() == 6
    digits = set(picture.cells[:, 1].tolist()) - set(range(1 + len(SHAPES)))
    assert digits == {1 + len(SHAPES) + digit for digit in (4, 7, 2)}
    corner = picture.cells[GRID * GRID - 1]
    assert not corner.any()


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_drawn_in_its_colour(shape: str) -> None:
    scene = Scene((Thing("yellow", shape, x=96, y=96, radius=20),), None, seed=0)
    is_yellow = (draw_picture(scene).pixels == COLOURS["yellow"]).all(-1)
    rows, columns = np.nonzero(is_yellow)
    assert 200 < is_yellow.sum() < 1400
    assert 8 < rows.max() - 96 <= 20
    assert 12 < columns.max() - 96 <= 20


def test_questions_of_one_answer() -> None:
    assert answers("colour") == {
        "What colour is the circle?": "red",
        "What colour is the square?": "blue",
        "What colour is the cross?": "blue",
    }
    assert answers("digits") == {"What number is shown?": "472"}
    assert answers("list") == {"What do you see?": "red circle, blue cross, blue square, 472"}


def test_counts_and_existence_are_true() -> None:
    counts = answers("count")
    assert counts["How many objects are there?"] == "3"
    assert counts["How many blue objects are there?"] == "2"
    assert counts["How many crosses are there?"] == "1"
    assert counts["How many stars are there?"] == "0"
    here = answers("existence")
    assert {text for text, answer in here.items() if answer == "yes"} == {
        "Is there a red circle?",
        "Is there a blue square?",
        "Is there a blue cross?",
    }
    assert here["Is there a red square?"] == "no"
    assert here["Is there a blue circle?"] == "no"


def test_positions_are_true() -> None:
    positions = answers("position")
    assert positions["Where is the red circle?"] == "top left"
    assert positions["Where is the blue square?"] == "top right"
    assert positions["Is the red circle left of the blue square?"] == "yes"
    assert positions["Is the blue cross above the red circle?"] == "no"
    twins = Scene((RED, Thing("red", "circle", x=150, y=150, radius=12)), None, seed=0)
    assert answers("position", twins) == {}


def test_pairs_never_shown_are_never_denied_in_training() -> None:
    draw, yes, no = np.random.default_rng(0), 0, 0
    held = {f"{colour} {shape}?" for colour, shape in HELD_OUT}
    for index in range(300):
        question = ask(draw_scene("train", seed=0, index=index), draw, "existence")
        assert question is not None
        assert " ".join(question.text.split()[-2:]) not in held
        yes, no = yes + (question.answer == "yes"), no + (question.answer == "no")
    assert 0.4 < yes / (yes + no) < 0.6


def test_kinds_come_by_their_shares() -> None:
    draw = np.random.default_rng(0)
    kinds = Counter(question.kind for _ in range(2000) if isinstance(question := ask(SCENE, draw), Question))
    assert set(kinds) == set(KINDS)
    assert kinds["existence"] > kinds["digits"] > 0
