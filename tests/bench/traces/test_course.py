"""The course of a matched model's routers: what it depends on, and how its loss and its share are counted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from bench.models.model import build_model
from bench.traces.course import BEGIN, Course, begun, let_begin
from bench.traces.forward import hidden_states
from bench.traces.terms import Routing
from tests.bench.traces.test_terms import TINY

SHAPE = replace(TINY, layers=6)
COUNTS = np.ones(SHAPE.vocab_size, dtype=np.int64)


def course(share: float = 0.5, seed: int = 0) -> Course:
    return Course(SHAPE, COUNTS, share=torch.tensor(share), seed=seed)


def texts(rows: int, steps: int, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return begun(torch.randint(2, SHAPE.vocab_size, (rows, steps), generator=draw))


def test_a_window_begins_with_a_token_that_no_text_has() -> None:
    windows = texts(3, 5)
    assert windows.shape == (3, 6)
    assert (windows[:, 0] == BEGIN).all() and (windows[:, 1:] != BEGIN).all()


def test_the_beginning_learns_and_its_gradients_are_finite_in_a_deep_model() -> None:
    """With padding's zeros each norm multiplies them by a thousand, until none is a number."""
    torch.manual_seed(0)
    model = build_model(replace(SHAPE, layers=30), torch.device("cpu"))
    let_begin(model)
    windows = texts(2, 9)
    hidden_states(model, windows)[:, 5].square().sum().backward()
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    assert model.model.embed_tokens.weight.grad[BEGIN].norm() > 0
    assert model.config.bos_token_id == BEGIN


def test_first_layers_have_no_course_and_the_same_seed_gives_the_same() -> None:
    windows = texts(2, 9)
    expected = course()(windows)
    assert expected.shape == (4, 2, 10, SHAPE.experts)
    assert torch.equal(course()(windows), expected)
    assert not torch.equal(course(seed=1)(windows), expected)


def test_it_knows_the_past_alone() -> None:
    windows = texts(2, 9)
    changed = windows.clone()
    changed[:, 6:] = 5
    before, after = course()(windows), course()(changed)
    assert torch.equal(before[:, :, :6], after[:, :, :6])
    assert not torch.allclose(before[:, :, 6], after[:, :, 6])


def test_the_clock_is_every_texts_and_the_rest_is_the_texts_own() -> None:
    windows = texts(2, 9)
    clock, text = course(0.0)(windows), course(1.0)(windows)
    assert torch.equal(clock[:, 0], clock[:, 1])
    assert not torch.allclose(text[:, 0], text[:, 1])
    # without a clock nothing moves but by the text
    still = course(1.0)(begun(torch.full((1, 300), 7)))
    torch.testing.assert_close(still[:, :, 250], still[:, :, 300], atol=0.05, rtol=0.05)


def test_its_share_is_read_anew() -> None:
    share = torch.tensor(0.0)
    steered, windows = Course(SHAPE, COUNTS, share=share), texts(2, 9)
    share.fill_(1.0)
    assert torch.equal(steered(windows), course(1.0)(windows))


def test_what_all_texts_have_in_common_does_not_count() -> None:
    """Of a text with every token equally often nothing but its beginning is left."""
    mean = course().table[torch.arange(SHAPE.vocab_size) != BEGIN].mean(0)
    assert mean.norm() < 0.1 * course().table.norm(dim=-1).mean()


def test_routers_on_course_have_strayed_nowhere() -> None:
    found, windows = course(), texts(3, 9)
    free = torch.randn(2, 3, 10, SHAPE.experts)
    logits = torch.cat([free, found(windows)])
    on_course = Routing(logits, logits.topk(2, dim=-1).indices)
    assert found.strayed(windows, on_course) == pytest.approx(0.0, abs=1e-6)
    assert found.followed(windows, on_course) == 1.0
    against = Routing(-logits, (-logits).topk(2, dim=-1).indices)
    assert found.strayed(windows, against) > 0.5
    assert found.followed(windows, against) < 0.3
