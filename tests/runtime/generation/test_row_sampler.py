"""Several rows at once against the sampler of one request: the same tokens kept, the same shares."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hetero_runtime.generation import SamplingParams, make_sampler
from hetero_runtime.generation.row_sampler import UNSOUND, RowSampler
from tests.runtime.generation.settings import HISTORY, SETTINGS, VOCAB


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4


def sampler_of(settings: list[dict[str, Any]], device: str = "cpu") -> RowSampler:
    sampler = RowSampler(len(settings), VOCAB, torch.device(device))
    for row, each in enumerate(settings):
        sampler.set(row, SamplingParams(**each), torch.tensor(HISTORY, device=device))
    return sampler


def draw(sampler: RowSampler, scores: torch.Tensor, uniforms: torch.Tensor, first_row: int = 0) -> list[int]:
    active = torch.ones(len(scores), dtype=torch.bool, device=scores.device)
    tokens: list[int] = sampler.draw(scores, uniforms, is_active=active, first_row=first_row).tolist()
    return tokens


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_rows_keep_what_the_sampler_of_one_request_keeps(device: str) -> None:
    scores = logits(len(SETTINGS)).to(device)
    kept = sampler_of(SETTINGS, device).kept(scores)
    for row, settings in enumerate(SETTINGS):
        transformed = make_sampler(SamplingParams(**settings), VOCAB, device).transform(scores[row], HISTORY)
        expected = torch.softmax(transformed, dim=-1)
        assert torch.equal(kept[row] > 0, expected > 0), settings
        torch.testing.assert_close(kept[row], expected, rtol=1e-5, atol=1e-7, msg=str(settings))


def test_draws_follow_the_distribution() -> None:
    sampler = sampler_of([{"temperature": 0.8, "top_k": 12}])
    scores, many = logits(1), 4000
    uniforms = (torch.arange(many) + 0.5) / many
    drawn = torch.tensor([draw(sampler, scores, uniforms[i : i + 1])[0] for i in range(many)])
    shares = torch.bincount(drawn, minlength=VOCAB) / many
    torch.testing.assert_close(shares, sampler.kept(scores)[0], rtol=0, atol=1e-3)


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2**-24, 1.0])
def test_the_ends_of_the_range_give_tokens_that_are_kept(uniform: float) -> None:
    sampler = sampler_of(SETTINGS)
    scores = logits(len(SETTINGS), seed=3)
    kept = sampler.kept(scores)
    for row, token in enumerate(draw(sampler, scores, torch.full((len(SETTINGS),), uniform))):
        assert kept[row, token] > 0, SETTINGS[row]


def test_greedy_rows_among_others_take_the_lowest_of_the_best() -> None:
    sampler = sampler_of([{"temperature": 5.0}, {}, {"repetition_penalty": 2.0}])
    scores = torch.zeros(3, VOCAB)
    scores[1, [7, 40]] = 2.5
    scores[2, 5], scores[2, 6] = 3.0, 2.0
    assert draw(sampler, scores, torch.tensor([0.3, 0.3, 0.3]))[1:] == [7, 6]
    assert sampler.greedy(scores[1:2]).tolist() == [7]


def test_a_token_counts_as_seen_only_in_an_active_row() -> None:
    sampler = sampler_of([{"repetition_penalty": 2.0}] * 2)
    scores = torch.zeros(2, VOCAB)
    scores[:, 50], scores[:, 51] = 3.0, 2.0
    uniforms = torch.zeros(2)
    active = torch.tensor([True, False])
    assert sampler.draw(scores, uniforms, is_active=active).tolist() == [50, 50]
    assert sampler.draw(scores, uniforms, is_active=active).tolist() == [51, 50]


def test_a_row_alone_draws_as_among_others_and_forgets_the_request_before() -> None:
    sampler, scores = sampler_of(SETTINGS), logits(len(SETTINGS), seed=5)
    uniforms = torch.rand(len(SETTINGS))
    together = draw(sampler, scores, uniforms)
    again = sampler_of(list(reversed(SETTINGS)))
    for row, settings in enumerate(SETTINGS):
        again.set(row, SamplingParams(**settings), torch.tensor(HISTORY))
    alone = [draw(again, scores[i : i + 1], uniforms[i : i + 1], i)[0] for i in range(len(SETTINGS))]
    assert alone == together


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_unsound_logits_are_said_and_disturb_no_other_row(bad: float) -> None:
    sampler, scores = sampler_of([{"temperature": 1.0, "seed": 1}, {}]), logits(2)
    sound = draw(sampler, scores, torch.tensor([0.5, 0.5]))
    scores[0, 9] = bad
    assert draw(sampler, scores, torch.tensor([0.5, 0.5])) == [UNSOUND, sound[1]]
    assert sampler.greedy(scores).tolist() == [UNSOUND, sound[1]]


def test_overflow_in_the_transforms_is_unsound() -> None:
    sampler = sampler_of([{"temperature": 0.001}])
    assert draw(sampler, torch.full((1, VOCAB), 3e38), torch.tensor([0.5])) == [UNSOUND]
