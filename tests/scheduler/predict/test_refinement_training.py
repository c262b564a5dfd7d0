"""A routing that the token decides, and a next router that tells the truth: both are found out."""

from __future__ import annotations

import numpy as np
import pytest

from hetero_scheduler.predict.recall import recall_at, refined_recall
from hetero_scheduler.predict.refinement_training import (
    RefinementOptions,
    RefinementProgress,
    one_step_shares,
    train_refinement,
)
from hetero_scheduler.predict.training_data import DocumentSplit, split_documents
from hetero_scheduler.trace import Trace
from tests.scheduler.predict.test_mamba2 import EXPERTS, LAYERS, TOP_K, make_predictor

DOCUMENTS, LENGTH, VOCABULARY = 30, 24, 8
OPTIONS = RefinementOptions(rank=8, epochs=6, batch=64, learning_rate=0.05)


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Experts follow from the token alone; routers asked early say them outright."""
    draw = np.random.default_rng(0)
    table = draw.normal(scale=3, size=(VOCABULARY, LAYERS, EXPERTS))
    tokens = draw.integers(0, VOCABULARY, DOCUMENTS * LENGTH).astype(np.int32)
    logits = (table[tokens] + draw.normal(scale=0.2, size=(len(tokens), LAYERS, EXPERTS))).astype(np.float16)
    topk = np.argsort(-logits, axis=-1, kind="stable")[..., :TOP_K].astype(np.int16)
    return Trace(logits, topk, tokens, np.arange(DOCUMENTS + 1) * LENGTH, early=2 * logits)


@pytest.fixture(scope="module")
def split() -> DocumentSplit:
    return split_documents(DOCUMENTS, seed=0)


def test_shares_are_what_the_predictor_says_step_by_step(trace: Trace) -> None:
    predictor = make_predictor()
    shares = one_step_shares(predictor.models, trace)
    assert shares[0] == pytest.approx(1 / EXPERTS, abs=1e-3)
    for step in range(3):
        for layer in range(LAYERS):
            predictor.observe(step, layer, trace.logits[step, layer])
            if (forecast := predictor.forecast()) is not None:
                said = shares[step + 1, list(forecast.layers)].astype(np.float32)
                np.testing.assert_allclose(said, forecast.probabilities[0], atol=2e-3)


def test_tokens_and_next_routers_are_learned(trace: Trace, split: DocumentSplit) -> None:
    shares = one_step_shares(make_predictor().models, trace)
    told: list[RefinementProgress] = []
    weights = train_refinement(trace, shares, split=split, options=OPTIONS, progress=told.append)
    assert told[-1].best_loss < 0.3 * told[0].first_loss
    token, router = refined_recall(weights, shares, trace, test=split.test)
    steps = np.arange(1, LENGTH) + trace.bounds[split.test[0]]
    plain = recall_at(shares[steps].astype(np.float32), trace.topk[steps], TOP_K)
    assert token.at_k > 0.9 > 0.6 > plain
    assert router.at_k >= token.at_k
    assert weights.pool is not None
    assert (weights.pool[1:, 1] > 0).all()


def test_the_same_seed_learns_the_same_and_no_early_routers_no_pool(
    trace: Trace, split: DocumentSplit
) -> None:
    shares = one_step_shares(make_predictor().models, trace)
    short = RefinementOptions(rank=4, epochs=1, batch=64)
    alone = Trace(trace.logits, trace.topk, trace.tokens, trace.bounds)
    first, second = (train_refinement(alone, shares, split=split, options=short) for _ in range(2))
    np.testing.assert_array_equal(first.head, second.head)
    assert first.pool is None


def test_what_does_not_help_is_not_learned(trace: Trace, split: DocumentSplit) -> None:
    """A rate that ruins everything leaves the forecasts as they were."""
    shares = one_step_shares(make_predictor().models, trace)
    ruinous = RefinementOptions(rank=4, epochs=2, batch=64, learning_rate=1e3)
    alone = Trace(trace.logits, trace.topk, trace.tokens, trace.bounds)
    weights = train_refinement(alone, shares, split=split, options=ruinous)
    kept = weights.with_tokens(shares[5].astype(np.float32), trace.tokens[5])
    np.testing.assert_allclose(kept, shares[5].astype(np.float32), rtol=2e-3, atol=1e-5)


def test_shares_of_another_trace_are_refused(trace: Trace, split: DocumentSplit) -> None:
    with pytest.raises(ValueError, match="are not of a trace"):
        train_refinement(trace, np.zeros((3, LAYERS, EXPERTS), np.float16), split=split, options=OPTIONS)
