"""Listening to decoder layers."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from bench.models.model import Geometry, build_model
from hetero_runtime.errors import CheckpointError
from hetero_runtime.hf.hidden_states import HiddenStates

TINY = Geometry(vocab_size=64, hidden=16, layers=3, heads=2, kv_heads=1, head_dim=8, experts=4, top_k=2)


@pytest.fixture
def model() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    return build_model(TINY, torch.device("cpu")).eval()


def test_what_layers_put_out_is_what_transformers_shows(model: Qwen3MoeForCausalLM) -> None:
    ids = torch.arange(5, 17)[None]
    with HiddenStates(model, (0, 1)).listening() as heard, torch.no_grad():
        shown = model(input_ids=ids, output_hidden_states=True).hidden_states
    assert torch.equal(heard.side_by_side(), torch.cat([shown[1], shown[2]], dim=-1))


def test_a_pass_that_nobody_listens_to_is_not_heard(model: Qwen3MoeForCausalLM) -> None:
    states = HiddenStates(model, (2,))
    with states.listening() as heard, torch.no_grad():
        model(input_ids=torch.arange(4)[None])
    before = heard.side_by_side()
    with torch.no_grad():
        model(input_ids=torch.arange(9)[None])
    assert heard.side_by_side() is not before
    assert torch.equal(heard.side_by_side(), before)


def test_a_layer_that_is_not_there_is_refused(model: Qwen3MoeForCausalLM) -> None:
    with pytest.raises(CheckpointError, match="layer 3"):
        HiddenStates(model, (1, 3))
