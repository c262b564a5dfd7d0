"""Selectors against Algorithm 1 written plainly, and what holds for all of them."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_scheduler.compression import METHODS, ImageTokens, make_selector
from tests.scheduler.compression.plain import compress

NUM_EXPERTS = 6
RATIOS = st.integers(1, 20).map(lambda n: Fraction(n, 20))


@st.composite
def prompts(draw: st.DrawFn) -> list[ImageTokens]:
    """One to three images with few distinct saliencies, so that ties are frequent."""
    num_layers, top_k = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    images = []
    for _ in range(draw(st.integers(1, 3))):
        rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        n = draw(st.integers(1, 24))
        saliency = rng.integers(0, draw(st.integers(1, 8)), n) / 4
        experts = rng.permuted(np.tile(np.arange(NUM_EXPERTS), (num_layers, n, 1)), axis=2)[..., :top_k]
        images.append(ImageTokens(saliency, experts))
    return images


@settings(max_examples=300, deadline=None)
@given(prompts(), RATIOS, RATIOS, st.sampled_from([0.0, 0.5, 2.0]))
def test_affinity_is_algorithm_1(
    images: list[ImageTokens], one: Fraction, other: Fraction, weight: float
) -> None:
    salient, keep = sorted((one, other))
    selector = make_selector(
        "affinity", keep_ratio=float(keep), salient_ratio=float(salient), affinity=weight
    )
    kept = [tokens.tolist() for tokens in selector.select(images)]
    assert kept == compress(images, salient=salient, keep=keep, weight=weight)


@settings(max_examples=100, deadline=None)
@given(prompts(), RATIOS, st.sampled_from(METHODS))
def test_every_method_keeps_the_budget(images: list[ImageTokens], keep: Fraction, method: str) -> None:
    selector = make_selector(method, keep_ratio=float(keep), salient_ratio=float(keep) / 2)
    for image, tokens in zip(images, selector.select(images), strict=True):
        num_tokens = len(image.saliency)
        assert len(tokens) == max(num_tokens * keep.numerator // keep.denominator, 1)
        assert np.all(np.diff(tokens) > 0)
        assert np.all((tokens >= 0) & (tokens < num_tokens))


@settings(max_examples=100, deadline=None)
@given(prompts(), RATIOS, st.sampled_from(["affinity", "mix"]))
def test_the_salient_core_is_kept_whatever_comes_beside(
    images: list[ImageTokens], keep: Fraction, method: str
) -> None:
    ratio = float(keep)
    core = make_selector("saliency", keep_ratio=ratio / 2).select(images)
    kept = make_selector(method, keep_ratio=ratio, salient_ratio=ratio / 2).select(images)
    for image, few, more in zip(images, core, kept, strict=True):
        if int(ratio / 2 * len(image.saliency)):  # otherwise there is no core, only the token of least budget
            assert set(few.tolist()) <= set(more.tolist())


@settings(max_examples=50, deadline=None)
@given(prompts(), RATIOS)
def test_without_affinity_what_remains_is_saliency(images: list[ImageTokens], keep: Fraction) -> None:
    ratio = float(keep)
    by_affinity = make_selector("affinity", keep_ratio=ratio, salient_ratio=ratio / 2, affinity=0.0)
    by_saliency = make_selector("saliency", keep_ratio=ratio)
    for one, other in zip(by_affinity.select(images), by_saliency.select(images), strict=True):
        assert one.tolist() == other.tolist()


def test_a_token_of_known_experts_is_kept_before_a_more_salient_one() -> None:
    """Four tokens, one layer: the core is token 0 with experts {0, 1}; token 3 adds none to them."""
    image = ImageTokens(
        np.array([1.0, 0.8, 0.6, 0.0]), np.array([[[0, 1], [2, 3], [1, 4], [1, 0]]], dtype=np.int64)
    )
    kept = make_selector("affinity", keep_ratio=0.5, salient_ratio=0.25).select([image])
    assert kept[0].tolist() == [0, 3]  # scores: 0.8 - 2 · 1, 0.6 - 2 · 1/2, 0


def test_the_same_expert_number_in_another_layer_is_another_expert() -> None:
    experts = np.array([[[0], [1], [0]], [[1], [0], [1]]], dtype=np.int64)  # two layers, three tokens
    image = ImageTokens(np.array([1.0, 0.5, 0.0]), experts)
    kept = make_selector("affinity", keep_ratio=0.67, salient_ratio=0.34).select([image])
    assert kept[0].tolist() == [0, 2]


def test_chance_is_the_seeds_and_no_two_images_alike() -> None:
    image = ImageTokens(np.zeros(64), np.zeros((1, 64, 1), dtype=np.int64))
    first, second = make_selector("random", keep_ratio=0.5, seed=1).select([image, image])
    again, _ = make_selector("random", keep_ratio=0.5, seed=1).select([image, image])
    other, _ = make_selector("random", keep_ratio=0.5, seed=2).select([image, image])
    assert first.tolist() == again.tolist()
    assert first.tolist() != second.tolist()
    assert first.tolist() != other.tolist()


def test_a_prompt_without_images() -> None:
    assert make_selector("affinity", keep_ratio=0.5).select([]) == []


@pytest.mark.parametrize(
    "arguments",
    [
        {"name": "zip", "keep_ratio": 0.5},
        {"name": "affinity", "keep_ratio": 0.5, "salient_ratio": 0.6},
        {"name": "random", "keep_ratio": 1.5},
        {"name": "affinity", "keep_ratio": 0.5, "affinity": -1.0},
    ],
    ids=["name", "core over budget", "more than all", "negative weight"],
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"unknown|must"):
        make_selector(**arguments)
