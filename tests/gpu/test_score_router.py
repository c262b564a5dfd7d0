"""Routers of sigmoid scores and of expert groups against the reference: interpreted, real on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton")
from hetero_gpu.score_router import ScoreForm, ScoreRouter, scored_reference
from hetero_gpu.weigh import WeightRule

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []

SIGMOID = WeightRule(is_renormalised=True, is_sigmoid=True, scale=2.5)
SOFTMAX = WeightRule(is_renormalised=False, scale=16.0)
FORMS = {
    "Moonlight": ScoreForm(64, 6, SIGMOID),
    "DeepSeek-V3": ScoreForm(256, 8, SIGMOID, num_groups=8, kept_groups=4),
    "DeepSeek-V2": ScoreForm(160, 6, SOFTMAX, num_groups=8, kept_groups=3),
    "no power of two": ScoreForm(60, 4, SIGMOID, num_groups=3, kept_groups=2),
    "pairs, all sigmoids as they are": ScoreForm(8, 2, WeightRule(False, True), num_groups=4, kept_groups=1),
}
SMALL = {
    "sigmoid": ScoreForm(20, 4, SIGMOID),
    "sigmoid groups": FORMS["pairs, all sigmoids as they are"],
    "softmax groups": ScoreForm(24, 6, SOFTMAX, num_groups=4, kept_groups=3),
}


def router_of(form: ScoreForm, size: int = 64) -> tuple[ScoreRouter, torch.Tensor, torch.Tensor | None]:
    """With its weight, and its correction where it has one."""
    weight = torch.randn(form.experts, size, device=DEVICE) / size**0.5
    is_sigmoid = form.weighing.is_sigmoid
    correction = torch.randn(form.experts, device=DEVICE) / 10 if is_sigmoid else None
    return ScoreRouter(weight, correction, form=form, dtype=torch.float32), weight, correction


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_scores_choice_and_weights_equal_reference(form: ScoreForm, dtype: torch.dtype) -> None:
    router, _, correction = router_of(form)
    logits = (2 * torch.randn(5, form.experts, device=DEVICE)).to(dtype)
    scored, expected = router.choose(logits), scored_reference(logits, correction, form=form)
    assert torch.equal(scored.scores.isinf(), expected.scores.isinf()), "the same groups are left out"
    torch.testing.assert_close(scored.scores, expected.scores)
    assert torch.equal(scored.experts, expected.experts)
    torch.testing.assert_close(scored.weights, expected.weights)
    torch.testing.assert_close(router.weigh(logits, expected.experts), expected.weights)


@pytest.mark.parametrize("form", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("tokens", [1, 3], ids=lambda n: f"tokens{n}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_router_is_a_product_and_a_choice(form: ScoreForm, tokens: int, dtype: torch.dtype) -> None:
    router, weight, _ = router_of(form, size=100)
    hidden = torch.randn(tokens, 100, device=DEVICE).to(dtype)
    for _ in range(2):  # the second call starts from what the first left of the count
        scored = router(hidden)
        torch.testing.assert_close(
            scored.logits, functional.linear(hidden.float(), weight), rtol=1e-4, atol=1e-4
        )
        for ours, of_logits in zip(scored, router.choose(scored.logits), strict=True):
            assert torch.equal(ours, of_logits)


@pytest.mark.parametrize("form", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("tokens", [1, 2], ids=lambda n: f"tokens{n}")
def test_the_next_router_speaks_in_the_same_launch(form: ScoreForm, tokens: int) -> None:
    (router, *_), (following, *_) = router_of(form), router_of(form)
    hidden = torch.randn(tokens, 64, device=DEVICE)
    for _ in range(2):
        together = router.with_next(hidden, following)
        for said, alone in zip(together, (router(hidden), following(hidden)), strict=True):
            assert all(map(torch.equal, said, alone))


def test_among_equals_the_lower_index_is_taken() -> None:
    """Of groups as of experts; sigmoids of great logits are all 1."""
    form = ScoreForm(8, 2, WeightRule(True, True), num_groups=4, kept_groups=2)
    router = ScoreRouter(torch.zeros(8, 4, device=DEVICE), None, form=form, dtype=torch.float32)
    scored = router.choose(torch.tensor([[0.0] * 8, [90, 0, 80, 0, 70, 0, 60, 0]], device=DEVICE))
    assert scored.experts.tolist() == [[0, 1], [0, 2]]
    assert scored.scores.isinf().tolist() == [[False] * 4 + [True] * 4] * 2


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="5 of 4 groups of 8 experts"):
        ScoreForm(8, 2, SIGMOID, num_groups=4, kept_groups=5)
    with pytest.raises(ValueError, match="1 of 3 groups of 8 experts"):
        ScoreForm(8, 2, SIGMOID, num_groups=3)
    with pytest.raises(ValueError, match="top-3 of 1 groups of 2 experts"):
        ScoreForm(8, 3, SIGMOID, num_groups=4)
