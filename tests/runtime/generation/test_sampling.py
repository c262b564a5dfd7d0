"""The sampler against transformers' own processors, bit for bit, and against its own seed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hetero_runtime.errors import RequestError
from hetero_runtime.generation import SamplingParams, make_sampler
from tests.runtime.generation.settings import HISTORY, SETTINGS, VOCAB


def logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 4


def reference(params: SamplingParams, scores: torch.Tensor) -> torch.Tensor:
    """The five processors one by one, in the order of transformers' `generate`."""
    ids, out = torch.tensor([HISTORY]), scores[None]
    if params.repetition_penalty != 1:
        out = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, out)
    out = TemperatureLogitsWarper(params.temperature)(ids, out)
    if params.top_k:
        out = TopKLogitsWarper(params.top_k)(ids, out)
    if params.top_p < 1:
        out = TopPLogitsWarper(params.top_p)(ids, out)
    if params.min_p:
        out = MinPLogitsWarper(params.min_p)(ids, out)
    return out[0]


@pytest.mark.parametrize(
    "settings",
    SETTINGS,
    ids=str,
)
@pytest.mark.parametrize("seed", [0, 1])
def test_transform_equals_transformers(settings: dict[str, Any], seed: int) -> None:
    params = SamplingParams(**settings)
    transformed = make_sampler(params, VOCAB, "cpu").transform(logits(seed), HISTORY)
    assert torch.equal(transformed, reference(params, logits(seed)))


def test_seeded_draw_equals_transformers() -> None:
    params = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=11)
    sampler = make_sampler(params, VOCAB, "cpu")
    generator = torch.Generator().manual_seed(11)
    for step in range(20):
        probabilities = torch.softmax(reference(params, logits(step)), dim=-1)
        expected = int(torch.multinomial(probabilities, 1, generator=generator))
        assert sampler.sample(logits(step), HISTORY) == expected


def test_requests_do_not_disturb_each_other() -> None:
    params = SamplingParams(temperature=1.0, seed=5)
    alone = make_sampler(params, VOCAB, "cpu")
    expected = [alone.sample(logits(i), ()) for i in range(10)]
    first, other = (
        make_sampler(params, VOCAB, "cpu"),
        make_sampler(SamplingParams(temperature=1.0), VOCAB, "cpu"),
    )
    drawn = []
    for i in range(10):
        torch.rand(3)
        other.sample(logits(i), ())
        drawn.append(first.sample(logits(i), ()))
    assert drawn == expected


def test_unseeded_requests_differ() -> None:
    params = SamplingParams(temperature=5.0)
    one, two = make_sampler(params, VOCAB, "cpu"), make_sampler(params, VOCAB, "cpu")
    flat = torch.zeros(VOCAB)
    assert [one.sample(flat, ()) for _ in range(20)] != [two.sample(flat, ()) for _ in range(20)]


def test_draws_follow_the_distribution() -> None:
    scores = torch.log(torch.tensor([0.5, 0.3, 0.2]))
    sampler = make_sampler(SamplingParams(temperature=1.0, seed=0), 3, "cpu")
    counts = torch.bincount(torch.tensor([sampler.sample(scores, ()) for _ in range(4000)]), minlength=3)
    assert torch.allclose(counts / 4000, scores.exp(), atol=0.03)


def test_greedy_takes_the_lowest_index_on_ties() -> None:
    scores = torch.zeros(VOCAB)
    scores[[7, 40, 90]] = 2.5
    assert make_sampler(SamplingParams(), VOCAB, "cpu").sample(scores, ()) == 7


def test_greedy_ignores_filters_and_obeys_the_penalty() -> None:
    scores = torch.zeros(VOCAB)
    scores[5], scores[6] = 3.0, 2.0
    assert make_sampler(SamplingParams(top_k=3, top_p=0.1, min_p=0.5), VOCAB, "cpu").sample(scores, [5]) == 5
    assert make_sampler(SamplingParams(repetition_penalty=2.0), VOCAB, "cpu").sample(scores, [5]) == 6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_input_is_left_as_it_was(dtype: torch.dtype) -> None:
    given = logits().to(dtype)
    before = given.clone()
    params = SamplingParams(temperature=0.5, top_k=4, repetition_penalty=1.5, seed=0)
    make_sampler(params, VOCAB, "cpu").sample(given, HISTORY)
    assert torch.equal(given, before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_unsound_logits_are_an_error_with_the_step(temperature: float, bad: float) -> None:
    sampler = make_sampler(SamplingParams(temperature=temperature, seed=0), VOCAB, "cpu")
    sampler.sample(logits(), ())
    sampler.sample(logits(), ())
    broken = logits()
    broken[[4, 9]] = bad
    with pytest.raises(RequestError, match=r"step 2 .*2 .*among 97 logits.*verify"):
        sampler.sample(broken, ())


def test_overflow_in_the_transforms_is_an_error() -> None:
    sampler = make_sampler(SamplingParams(temperature=0.001, seed=0), VOCAB, "cpu")
    with pytest.raises(RequestError, match=r"step 0 .*too large for float32"):
        sampler.sample(torch.full((VOCAB,), 3e38), ())


@pytest.mark.gpu
def test_cuda_equals_cpu_greedily_and_repeats_its_seed() -> None:
    on_gpu = logits().cuda()
    assert make_sampler(SamplingParams(), VOCAB, "cuda").sample(on_gpu, ()) == int(logits().argmax())
    params = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.2, seed=3)
    one, two = make_sampler(params, VOCAB, "cuda"), make_sampler(params, VOCAB, "cuda")
    draws = [one.sample(on_gpu, HISTORY) for _ in range(8)]
    assert draws == [two.sample(on_gpu, HISTORY) for _ in range(8)]
    with pytest.raises(RequestError, match="step 8"):
        one.sample(torch.full_like(on_gpu, math.nan), HISTORY)
    assert one.sample(on_gpu, HISTORY) >= 0  # the CUDA context is still alive
