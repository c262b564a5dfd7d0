"""Prompts cut behind a layer, in models that embed positions in different ways, against layers by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_runtime.hf.token_cut import TokenCut
from tests.architectures import build_checkpoint, prompt_ids, reference_model

NAMES = ("DeepseekV2", "Glm4Moe", "Qwen3Moe")  # complex rotary, partial rotary; the first two begin dense


def cut_by_hand(model: Any, ids: torch.Tensor, kept: torch.Tensor, *, first_layer: int) -> torch.Tensor:
    """Logits of the last token, `[1, vocab]`."""
    text = model.model
    hidden, positions = text.embed_tokens(ids), torch.arange(ids.shape[1])[None]
    for number, layer in enumerate(text.layers):
        if number == first_layer:
            hidden, positions = hidden[:, kept], positions[:, kept]
        hidden = layer(
            hidden,
            attention_mask=None,
            position_ids=positions,
            position_embeddings=text.rotary_emb(hidden, position_ids=positions),
        )
    logits: torch.Tensor = model.lm_head(text.norm(hidden)[:, -1])
    return logits


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_a_cut_prompt_is_that_of_layers_run_by_hand(name: str, tmp_path: Path) -> None:
    model = reference_model(build_checkpoint(name, tmp_path))
    ids, kept = prompt_ids(17), torch.tensor([0, 3, 4, 9, 16])
    num_dense = int(getattr(model.config, "first_k_dense_replace", 0) or 0)
    cut = TokenCut(model, first=1)
    with cut.during(lambda: kept):
        logits = model(input_ids=ids, logits_to_keep=1).logits[:, -1]
        assert cut.kept is kept
    assert torch.equal(logits, cut_by_hand(model, ids, kept, first_layer=1 + num_dense))
    assert cut.kept is None


@torch.inference_mode()
def test_a_pass_that_nobody_cuts_runs_as_ever(tmp_path: Path) -> None:
    model = reference_model(build_checkpoint("Qwen3Moe", tmp_path))
    before = model(input_ids=prompt_ids(17)).logits
    cut = TokenCut(model, first=1)
    assert torch.equal(model(input_ids=prompt_ids(17)).logits, before)
    with cut.during(lambda: None):
        assert torch.equal(model(input_ids=prompt_ids(17)).logits, before)


@torch.inference_mode()
def test_a_mask_is_no_prompt_of_ours(tmp_path: Path) -> None:
    model = reference_model(build_checkpoint("Qwen3Moe", tmp_path))
    mask = torch.ones(1, 17, dtype=torch.long)
    mask[0, 0] = 0
    cut = TokenCut(model, first=1)
    with pytest.raises(AssertionError, match="has no mask"), cut.during(lambda: torch.tensor([16])):
        model(input_ids=prompt_ids(17), attention_mask=mask)
    assert cut.kept is None
