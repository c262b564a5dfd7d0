"""The lookahead predictor: what it sees, what it learns, what it says, and how that is counted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hetero_scheduler.predict.lookahead_features import (
    FADING,
    LookaheadShape,
    Passes,
    faded,
    seen_at_layers,
    shares_ahead,
    shares_of,
)
from hetero_scheduler.predict.lookahead_mlp import LookaheadMlp
from hetero_scheduler.predict.lookahead_model import LookaheadModel, LookaheadWeights
from hetero_scheduler.predict.lookahead_recall import (
    by_chance,
    counts_of,
    hot_recall,
    predicted,
    rivals,
    semantic_depth,
)
from hetero_scheduler.predict.lookahead_training import LookaheadOptions, train_lookahead

LAYERS, EXPERTS, TOP_K, HIDDEN, VISUAL, WINDOW = 4, 8, 2, 6, 3, 2
SHAPE = LookaheadShape(LAYERS, EXPERTS, TOP_K, HIDDEN, VISUAL, window=WINDOW, decay=0.8)


def passes(num_documents: int = 6, steps: int = 12, *, seed: int = 0) -> Passes:
    """A prompt, then single tokens. Experts follow the hidden state, and what was seen."""
    rng = np.random.default_rng(seed)
    count = num_documents * steps
    document = np.repeat(np.arange(num_documents), steps)
    visual = rng.normal(size=(num_documents, VISUAL))
    hidden = np.repeat(rng.normal(size=(count, 1, HIDDEN)), LAYERS, axis=1)
    weights = np.random.default_rng(9)  # the model's, the same whatever the text
    of_hidden = weights.normal(size=(LAYERS, HIDDEN, EXPERTS))
    of_visual = weights.normal(size=(LAYERS, VISUAL, EXPERTS))
    logits = np.einsum("nlh,lhe->nle", hidden, of_hidden)
    logits += 2 * np.einsum("dv,lve->dle", visual, of_visual)[document]
    share = np.zeros((count, LAYERS, EXPERTS), np.float32)
    np.put_along_axis(share, np.argsort(-logits, axis=-1)[..., :TOP_K], 1, axis=-1)
    is_prompt = np.arange(count) % steps == 0
    share[is_prompt] = (share[is_prompt] + np.roll(share[is_prompt], 1, axis=-1)) / 2
    history = np.zeros_like(share)
    for i in np.flatnonzero(~is_prompt):
        history[i] = faded(history[i - 1], share[i - 1])
    return Passes(
        history.astype(np.float16),
        share.astype(np.float16),
        hidden.astype(np.float16),
        visual.astype(np.float16),
        document,
        np.where(is_prompt, 2, 1),
    )


def untrained(shape: LookaheadShape = SHAPE, *, seed: int = 0) -> LookaheadModel:
    """A model whose norms have seen something."""
    torch.manual_seed(seed)
    model = LookaheadModel(shape, width=5, dropout=0.1)
    for _ in range(3):
        model(
            torch.randn(16, shape.num_speaking, shape.history_size + shape.hidden_size),
            torch.randn(16, shape.visual_size),
        )
    return model.eval()


def at_width(one: Passes) -> LookaheadShape:
    return one.shape(TOP_K)._replace(window=WINDOW)


# ---- what it sees


def test_shares_are_of_tokens() -> None:
    assert shares_of(np.array([[0, 3], [3, 1], [3, 2], [0, 3]]), 5).tolist() == [0.5, 0.25, 0.25, 1.0, 0.0]


def test_a_layer_sees_its_own_run_and_what_is_kept_of_the_next_ones() -> None:
    one = passes(steps=3)
    seen = seen_at_layers(one, WINDOW).reshape(len(one), LAYERS - 1, WINDOW + 1, EXPERTS)
    own = (1 - FADING) * one.history[2, 1] + FADING * one.share[2, 1]
    np.testing.assert_allclose(seen[2, 1, 0], own, atol=1e-3)
    np.testing.assert_allclose(seen[2, 1, 1:], one.history[2, 2:4], atol=1e-3)
    assert not seen[2, 2, 2].any()  # beyond the last layer


def test_beyond_the_last_layer_there_is_nothing_to_say() -> None:
    one = passes()
    ahead = shares_ahead(one, WINDOW)
    np.testing.assert_array_equal(ahead[5, 0], one.share[5, 1:3])
    np.testing.assert_array_equal(ahead[5, 2, 0], one.share[5, 3])
    assert np.isnan(ahead[:, 2, 1]).all()


def test_parts_that_disagree_are_refused() -> None:
    one = passes()
    with pytest.raises(ValueError, match="disagree"):
        Passes(one.history, one.share, one.hidden[:, :-1], one.visual, one.document, one.num_tokens)
    with pytest.raises(ValueError, match="passes"):
        Passes(one.history, one.share, one.hidden, one.visual, one.document[:-1], one.num_tokens)


# ---- what it says


def test_folded_norms_say_what_the_trained_model_says() -> None:
    model = untrained()
    features = torch.randn(4, SHAPE.num_speaking, SHAPE.history_size + HIDDEN)
    visual = torch.randn(4, VISUAL)
    with torch.no_grad():
        expected = model(features, visual)
    weights = model.fold()
    assert torch.allclose(weights.all_scores(features, visual).reshape(expected.shape), expected, atol=1e-5)
    seen = weights.seen(visual[0])
    for layer in range(SHAPE.num_speaking):
        ours = weights.scores(layer, features[0, layer], seen).reshape(WINDOW, EXPERTS)
        assert torch.allclose(ours, expected[0, layer], atol=1e-5)


def test_step_by_step_it_says_what_it_says_of_gathered_passes() -> None:
    one = passes(num_documents=2, steps=5)
    weights = untrained().fold()
    scores = predicted(weights, SHAPE, one)
    predictor = LookaheadMlp(weights, SHAPE)
    for number in range(1, len(one)):  # the first pass of a document is its prompt
        if one.is_prompt[number]:
            predictor.reset()
            predictor._history[:LAYERS] = faded(
                np.zeros((LAYERS, EXPERTS), np.float32), one.share[number].astype(np.float32)
            )
            predictor.see(torch.from_numpy(one.visual[one.document[number]].astype(np.float32)))
            continue
        if number < 5:
            continue
        for layer in range(LAYERS):
            chosen = np.flatnonzero(one.share[number, layer])[None]
            hidden = torch.from_numpy(one.hidden[number, layer].astype(np.float32))
            predictor.observe_tokens(number, layer, chosen, hidden)
            said = predictor.forecast()
            if layer == LAYERS - 1:
                assert said is None
                continue
            assert said is not None
            count = min(WINDOW, LAYERS - 1 - layer)
            assert said.layers == tuple(range(layer + 1, layer + 1 + count))
            assert said.first_pos == number * LAYERS + layer + 1
            active = 1 / (1 + np.exp(-scores[number, layer, :count])) / SHAPE.decays()[:count, None]
            expected = active / np.maximum(active.sum(axis=1, keepdims=True), TOP_K)
            np.testing.assert_allclose(said.probabilities[0], expected, atol=2e-3)
            assert (said.probabilities[0].sum(axis=1) <= 1 + 1e-6).all()


def test_one_token_by_the_contract_is_a_pass_of_one_token() -> None:
    rng, weights = np.random.default_rng(0), untrained().fold()
    one, other = LookaheadMlp(weights, SHAPE), LookaheadMlp(weights, SHAPE)
    logits = rng.normal(size=EXPERTS).astype(np.float32)
    hidden = rng.normal(size=HIDDEN).astype(np.float32)
    with pytest.raises(ValueError, match="hidden states"):
        one.observe(0, 0, logits)
    one.observe(0, 0, logits, hidden)
    other.observe_tokens(0, 0, np.argsort(-logits)[None, :TOP_K], torch.from_numpy(hidden))
    ours, theirs = one.forecast(), other.forecast()
    assert ours is not None and theirs is not None
    np.testing.assert_array_equal(ours.probabilities, theirs.probabilities)


def test_a_new_text_knows_nothing_of_the_old_one() -> None:
    predictor = LookaheadMlp(untrained().fold(), SHAPE)

    def said() -> np.ndarray:
        predictor.observe_tokens(0, 0, np.array([[1, 2]]), torch.ones(HIDDEN))
        forecast = predictor.forecast()
        assert forecast is not None
        return forecast.probabilities

    first = said()
    predictor.see(torch.full((VISUAL,), 3.0))
    assert not np.array_equal(said(), first)
    predictor.reset()
    np.testing.assert_array_equal(said(), first)
    fresh = predictor.another()
    assert fresh.forecast() is None


# ---- what it learns


def test_it_learns_what_follows_and_what_was_seen() -> None:
    one = passes(num_documents=40, steps=20)
    train, validation, test = np.arange(28), np.arange(28, 32), np.arange(32, 40)
    counts = (2, 3, 4)
    held_out = one.take(np.isin(one.document, test) & ~one.is_prompt)
    truth = shares_ahead(held_out, WINDOW)
    recalls = {}
    for name, lessons in (("seeing", one), ("blind", one.without_visual())):
        shape, losses = at_width(lessons), []
        weights = train_lookahead(
            lessons,
            shape,
            train=train,
            validation=validation,
            options=LookaheadOptions(epochs=12, width=24),
            progress=lambda at, losses=losses: losses.append(at.validation_loss),
        )
        asked = held_out if shape.visual_size else held_out.without_visual()
        recalls[name] = hot_recall(name, predicted(weights, shape, asked), truth, counts)[0].at
        assert min(losses) < losses[0]
    for name, scores in rivals(held_out, one.take(np.isin(one.document, train)), WINDOW):
        recalls[name] = hot_recall(name, scores, truth, counts)[0].at
    assert recalls["seeing"][0] > recalls["blind"][0] > recalls["frequency"][0]
    assert recalls["seeing"][0] > recalls["history"][0]
    assert recalls["seeing"][0] > 2 * by_chance(EXPERTS, counts).at[0]


def test_the_same_seed_gives_the_same_weights() -> None:
    one = passes()
    shape, options = at_width(one), LookaheadOptions(epochs=2, width=4)
    state = torch.random.get_rng_state()
    first, second = (
        train_lookahead(one, shape, train=np.arange(4), validation=np.arange(4, 6), options=options)
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_too_little_to_learn_from_is_refused() -> None:
    one = passes()
    options = LookaheadOptions(epochs=1)
    with pytest.raises(ValueError, match="too few"):
        train_lookahead(one, at_width(one), train=np.arange(4), validation=np.array([99]), options=options)
    flat = LookaheadShape(1, EXPERTS, TOP_K, HIDDEN, 0)
    with pytest.raises(ValueError, match="no layer to look ahead to"):
        train_lookahead(one, flat, train=np.arange(4), validation=np.arange(4, 6), options=options)


# ---- how it is counted


def test_recall_counts_experts_by_the_tokens_that_chose_them() -> None:
    truth = np.array([[[[1.0, 1.0, 0.0, 0.0], [np.nan] * 4]], [[[0.75, 0.25, 1.0, 0.0], [np.nan] * 4]]])
    scores = np.broadcast_to(np.array([3.0, 2.0, 1.0, 0.0]), truth.shape)
    mean, near = hot_recall("x", scores, truth, (1, 2, 3))  # no layer lies two ahead
    # 1 of 2, 2 of 2; 0.75, 1 and 2 of 2 tokens' choices
    assert near.at == pytest.approx(((0.5 + 0.375) / 2, (1 + 0.5) / 2, 1.0))
    assert mean.at == near.at and (mean.distance, near.distance) == (0, 1)


def test_tens_of_128_are_shares_of_any_number() -> None:
    assert counts_of(128) == (10, 20, 30)
    assert counts_of(64) == (5, 10, 15)
    assert counts_of(16) == (2, 3, 4)
    assert by_chance(64, counts_of(64)).at == (5 / 64, 10 / 64, 15 / 64)


def test_the_depth_at_which_routing_says_enough() -> None:
    truth = np.zeros((1, 4, 1, 4), np.float32)
    truth[..., 0] = 1
    scores = np.zeros((1, 4, 1, 4), np.float32)
    scores[:, 0, :, 3] = 1  # the first layer knows nothing
    scores[:, 1:, :, 0] = 1
    assert semantic_depth(scores, truth, 1) == 2
    assert semantic_depth(truth, truth, 1) == 1


def test_weights_move_as_a_whole() -> None:
    moved = untrained().fold().to("cpu", torch.bfloat16)
    assert isinstance(moved, LookaheadWeights)
    assert {part.dtype for part in moved} == {torch.bfloat16}
