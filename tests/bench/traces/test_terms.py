"""Router terms on routings whose value is known."""

from __future__ import annotations

import pytest
import torch

from bench.models.model import Geometry, build_model, router_balance
from bench.traces.terms import (
    RECENT,
    Companion,
    RouterTap,
    Routing,
    balance_loss,
    foresight_loss,
    kept_share,
)

TINY = Geometry(
    vocab_size=64,
    hidden=32,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=16,
    experts=8,
    top_k=2,
    intermediate=8,
    max_length=64,
)


def routing(logits: torch.Tensor, top_k: int) -> Routing:
    return Routing(logits, logits.topk(top_k, dim=-1).indices)


def test_balance_is_that_of_the_bundled_models_training() -> None:
    torch.manual_seed(0)
    said = routing(torch.randn(3, 4, 5, 8), 2)
    found = balance_loss(said.logits.softmax(-1), said.chosen)
    assert found == pytest.approx(float(router_balance(said.logits.flatten(1, 2), 2)), rel=1e-5)


def test_routing_that_repeats_is_kept() -> None:
    steady = 9 * torch.eye(8)[[0, 0, 0, 0, 0, 0]].expand(1, 1, 6, 8)
    moving = 9 * torch.eye(8)[[0, 1, 2, 3, 4, 5]].expand(1, 1, 6, 8)
    steady_share, moving_share = (
        kept_share(said.logits.softmax(-1), said.chosen) for said in (routing(steady, 1), routing(moving, 1))
    )
    assert steady_share.shape == (1, 1, 5)
    assert steady_share.min() > 0.99
    assert moving_share.max() < 0.01


@pytest.mark.parametrize(("back", "is_recent"), [(1, True), (RECENT, True), (RECENT + 1, False)])
def test_recent_are_the_last_few_tokens(back: int, is_recent: bool) -> None:
    """Expert 0 is chosen by token 0 and by token `back`, all others choose experts of their own."""
    order = [*range(back), 0]
    said = routing(9 * torch.eye(8)[order].expand(1, 1, back + 1, 8), 1)
    share = kept_share(said.logits.softmax(-1), said.chosen)
    assert bool(share[0, 0, -1] > 0.9) is is_recent


def test_even_probabilities_keep_the_share_of_the_chosen() -> None:
    said = routing(torch.zeros(2, 3, 5, 8), 2)
    assert torch.allclose(kept_share(said.logits.softmax(-1), said.chosen), torch.tensor(2 / 8))


def test_what_was_expected_is_foreseen() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 5, 8)
    expected = logits[:, :, 1:].permute(1, 2, 0, 3)
    assert foresight_loss(expected, logits) == pytest.approx(0.0, abs=1e-6)
    assert foresight_loss(expected.flip(-1), logits) > 0.1


@pytest.mark.parametrize("ahead", [1, 3])
def test_a_companion_sees_the_past_alone(ahead: int) -> None:
    """Steps 6 and 7 are changed; the first expectation that may notice is of step 6 + `ahead`."""
    torch.manual_seed(0)
    companion = Companion(TINY, ahead=ahead, width=32)
    logits = torch.randn(2, 1, 8 + ahead, 8)
    before = companion.expect(routing(logits, 2))
    logits[:, :, 6:8] = torch.randn(2, 1, 2, 8)
    after = companion.expect(routing(logits, 2))
    assert before.shape == (1, 8, 2, 8)
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.equal(before[:, 6], after[:, 6])


def test_recall_is_of_the_steps_that_were_expected() -> None:
    companion = Companion(TINY, ahead=2, width=32)
    said = routing(torch.randn(2, 3, 9, 8), 2)
    with torch.no_grad():
        companion.head.weight.zero_()
        companion.head.bias.zero_().view(2, 8)[:, :5] += 1  # k + 3 of 8: the same five are always expected
    expected = (said.chosen[:, :, 2:] < 5).float().mean()
    assert companion.recall(said) == pytest.approx(float(expected))


def test_foresight_compares_with_the_last_steps() -> None:
    logits = torch.randn(2, 3, 9, 8)
    assert foresight_loss(logits[:, :, 4:].permute(1, 2, 0, 3), logits) == pytest.approx(0.0, abs=1e-6)


def test_tap_hears_every_router_and_forgets() -> None:
    torch.manual_seed(0)
    model = build_model(TINY, torch.device("cpu"))
    tap = RouterTap(model)
    windows = torch.randint(0, 64, (3, 5))
    outputs = model.model(input_ids=windows, use_cache=False, output_router_logits=True)
    said = tap.take(3)
    assert torch.equal(said.logits.flatten(1, 2), torch.stack(outputs.router_logits).float())
    assert said.chosen.shape == (2, 3, 5, 2)
    with pytest.raises(AssertionError, match="no forward since"):
        tap.take(3)
