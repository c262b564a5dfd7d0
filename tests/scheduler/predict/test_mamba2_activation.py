"""What a predictor reads."""

from __future__ import annotations

import torch

from hetero_scheduler.predict.activation import activation_state, predicted_activation


def test_only_chosen_experts_share_and_keep_their_ratio() -> None:
    logits = torch.tensor([3.0, 1.0, 2.0, 9.0])
    state = activation_state(logits, torch.tensor([0, 2]))
    assert state[[1, 3]].tolist() == [0.0, 0.0]
    torch.testing.assert_close(state[0] / state[2], torch.tensor(1.0).exp())
    torch.testing.assert_close(state.sum(), torch.tensor(1.0))


def test_half_precision_logits_give_float32_shares_for_any_leading_shape() -> None:
    logits = torch.randn(5, 3, 8).half()
    chosen = logits.topk(2, dim=-1).indices
    state = activation_state(logits, chosen)
    assert state.dtype == torch.float32 and state.shape == (5, 3, 8)
    assert ((state > 0).sum(-1) == 2).all()


def test_a_prediction_counts_its_highest_as_activated() -> None:
    logits = torch.tensor([[0.1, 5.0, -1.0, 4.0]])
    state = predicted_activation(logits, top_k=2)
    assert (state > 0).tolist() == [[False, True, False, True]]
    torch.testing.assert_close(predicted_activation(state.log(), top_k=2), state)
