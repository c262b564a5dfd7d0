"""Router terms on routings whose value is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.models.model import Geometry, build_model, router_balance
from bench.traces.terms import (
    EARLIER,
    RECENT,
    Companion,
    RouterTap,
    Routing,
    balance_loss,
    foresight_loss,
    kept_shares,
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
        kept_shares(said.logits.softmax(-1), said.chosen).recent
        for said in (routing(steady, 1), routing(moving, 1))
    )
    assert steady_share.shape == (1, 1, 5)
    assert steady_share.min() > 0.99
    assert moving_share.max() < 0.01


@pytest.mark.parametrize("back", [1, RECENT, RECENT + 1, EARLIER, EARLIER + 1])
def test_an_expert_is_recent_then_earlier_then_forgotten(back: int) -> None:
    """Expert 0 is chosen by token 0 and by token `back`, all others choose experts of their own."""
    experts = EARLIER + 2
    order = [*range(back), 0]
    said = routing(19 * torch.eye(experts)[order].expand(1, 1, back + 1, experts), 1)
    recent, earlier = (float(share[0, 0, -1]) for share in kept_shares(said.logits.softmax(-1), said.chosen))
    assert (recent > 0.9) is (back <= RECENT)
    assert (earlier > 0.9) is (RECENT < back <= EARLIER)


def test_even_probabilities_keep_the_share_of_the_chosen() -> None:
    said = routing(torch.zeros(2, 3, 5, 8), 2)
    recent, earlier = kept_shares(said.logits.softmax(-1), said.chosen)
    assert torch.allclose(recent, torch.tensor(2 / 8))
    assert torch.equal(earlier, torch.zeros(2, 3, 4))


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
        for model in companion.models:
            model.head.weight.zero_()
            model.head.bias.zero_().view(1, 8)[:, :5] += 1  # k + 3 of 8: the same five are always expected
    is_real = torch.ones(3, 9, dtype=torch.bool)
    is_real[1, 4:] = False
    found = (said.chosen < 5).float().mean((0, -1))
    is_real[:, :2] = False  # nothing expected these
    assert companion.recall(said, is_real) == pytest.approx(float(found[is_real].mean()))


def test_foresight_leaves_the_first_layers_of_a_group_alone() -> None:
    assert Companion(replace(TINY, layers=10), width=32).drawn.tolist() == [2, 3, 4, 7, 8, 9]
    assert Companion(TINY, width=32).drawn.tolist() == [0, 1]


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
