"""Rows in our fixed cache against transformers' own cache and attention, greedy tokens over 64 steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, OlmoeConfig

from hetero_runtime.errors import RequestError
from hetero_runtime.hf.attention import layer_kinds, why_not_capturable
from hetero_runtime.hf.sequences import StaticSequences
from hetero_runtime.plan import read_geometry
from hetero_runtime.plan.captured import why_drafts_stay, why_model_needs_host
from hetero_runtime.plan.model_config import rope_types
from tests.architectures import (
    ARCHITECTURES,
    QUANTIZED,
    build_checkpoint,
    image_inputs,
    prompt_ids,
    reference_model,
)
from tests.runtime.hf.plain import greedy_logits, tokens_of

COVERED = tuple(name for name in ARCHITECTURES if name not in (*QUANTIZED, "DeepseekV4"))
STEPS = 64


@pytest.mark.parametrize("name", COVERED)
def test_rows_at_different_positions_say_what_transformers_says(name: str, tmp_path: Path) -> None:
    model: Any = reference_model(build_checkpoint(name, tmp_path))
    prompts = [prompt_ids(11, seed=1)[0], prompt_ids(3, seed=2)[0]]
    expected = [tokens_of(greedy_logits(model, prompt, num_steps=STEPS)) for prompt in prompts]
    sequences = StaticSequences(model, rows=3, max_length=96)
    said = [[int(sequences.prefill(2, prompts[0]).argmax())], []]
    tokens = torch.zeros(3, dtype=torch.long)
    for step in range(STEPS):
        if step == 10:  # the second row joins while the first goes on
            said[1].append(int(sequences.prefill(0, prompts[1]).argmax()))
        tokens[2] = said[0][-1]
        tokens[0] = said[1][-1] if said[1] else 0
        logits = sequences.decode(tokens)
        said[0].append(int(logits[2].argmax()))
        if said[1]:
            said[1].append(int(logits[0].argmax()))
    assert said[0] == expected[0]
    assert said[1] == expected[1][: len(said[1])] and len(said[1]) == STEPS - 9
    assert sequences.lengths.tolist() == [3 + STEPS - 10, 0, 11 + STEPS]
    assert [sequences.length(row) for row in range(3)] == sequences.lengths.tolist()


@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss", "Qwen3Next", "DeepseekV3"])
def test_prompt_may_come_in_parts_and_a_row_may_be_used_again(name: str, tmp_path: Path) -> None:
    model: Any = reference_model(build_checkpoint(name, tmp_path))
    prompt, other = prompt_ids(20, seed=1)[0], prompt_ids(5, seed=2)[0]
    expected, expected_other = (greedy_logits(model, ids, num_steps=0)[0] for ids in (prompt, other))
    sequences = StaticSequences(model, rows=2, max_length=32)
    sequences.prefill(1, prompt[:7])
    torch.testing.assert_close(sequences.prefill(1, prompt[7:]), expected, rtol=1e-4, atol=1e-4)
    sequences.reset(1)
    assert sequences.length(1) == 0
    torch.testing.assert_close(sequences.prefill(1, other), expected_other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["Olmoe", "GptOss", "DeepseekV2"])
def test_other_caches_keep_working_once_our_attention_is_installed(name: str, tmp_path: Path) -> None:
    model: Any = reference_model(build_checkpoint(name, tmp_path))
    prompt = prompt_ids(12)[0]
    expected = tokens_of(greedy_logits(model, prompt, num_steps=12))
    StaticSequences(model, rows=1, max_length=32)
    assert tokens_of(greedy_logits(model, prompt, num_steps=12)) == expected


def test_images_come_with_the_prompt(tmp_path: Path) -> None:
    model: Any = reference_model(build_checkpoint("Qwen3VLMoe", tmp_path))
    inputs = image_inputs()
    ids = inputs.pop("input_ids")[0]
    images = {name: inputs[name] for name in ("pixel_values", "image_grid_thw", "mm_token_type_ids")}
    expected = tokens_of(greedy_logits(model, ids, num_steps=16, images=images))
    sequences = StaticSequences(model, rows=2, max_length=96)
    said = [int(sequences.prefill(1, ids, images).argmax())]
    for _ in range(16):
        said.append(int(sequences.decode(torch.tensor([0, said[-1]]))[1].argmax()))
    assert said == expected


def test_truncated_row_goes_on_from_there(tmp_path: Path) -> None:
    model: Any = reference_model(build_checkpoint("Qwen3Moe", tmp_path))
    prompt = prompt_ids(9)[0]
    expected = greedy_logits(model, prompt, num_steps=0)[0]
    sequences = StaticSequences(model, rows=1, max_length=16)
    sequences.prefill(0, prompt[:8])
    for _ in range(3):
        sequences.decode(torch.tensor([7]))
    sequences.truncate(0, 8)
    torch.testing.assert_close(sequences.decode(prompt[8:])[0], expected, rtol=1e-4, atol=1e-4)


def test_full_row_is_refused_before_it_is_written(tmp_path: Path) -> None:
    model: Any = reference_model(build_checkpoint("Olmoe", tmp_path))
    sequences = StaticSequences(model, rows=1, max_length=8)
    with pytest.raises(RequestError, match="9 tokens do not fit in a row of 8"):
        sequences.prefill(0, prompt_ids(9)[0])
    sequences.prefill(0, prompt_ids(7)[0])
    sequences.decode(torch.tensor([3]))
    with pytest.raises(RequestError, match="9 tokens do not fit"):
        sequences.decode(torch.tensor([3]))
    assert sequences.length(0) == 8


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_which_models_can_be_captured(name: str, tmp_path: Path) -> None:
    """The plan, which asks config.json alone, says the same."""
    folder = build_checkpoint(name, tmp_path)
    config = AutoConfig.from_pretrained(folder)
    reason, geometry = why_not_capturable(config), read_geometry(folder)
    assert (reason is not None) == (name == "DeepseekV4"), reason
    assert why_model_needs_host(geometry.layer_kinds, geometry.rope_types) == reason
    assert why_drafts_stay(geometry.layer_kinds) == why_drafts_stay(layer_kinds(config))


_SYNCHRONISING = {
    "_local_scalar_dense",
    "nonzero",
    "is_nonzero",
    "_unique2",
    "masked_select",
    "equal",
    "lift_fresh",
    "lift_fresh_copy",
    "bincount",
    "_assert_async",
}
"""Operations that make a GPU and its host wait for one another, or copy a literal to it."""


class _Spy(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(function.name().partition("::")[2].partition(".")[0])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", COVERED)
def test_step_never_asks_the_host(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With experts and attention that do not, as on a GPU."""

    def decode_attention(query: torch.Tensor, keys: Any, values: torch.Tensor, **_: Any) -> torch.Tensor:
        return query.new_zeros(*query.shape[:2], values.shape[-1])

    model: Any = reference_model(build_checkpoint(name, tmp_path))
    model.set_experts_implementation("batched_mm")
    sequences = StaticSequences(model, rows=2, max_length=16)
    sequences.prefill(0, prompt_ids(4)[0])
    monkeypatch.setattr("hetero_runtime.hf.attention.decode_attention", decode_attention)
    monkeypatch.setattr("hetero_runtime.hf.kv_cache.append_kv", lambda *_: None)
    monkeypatch.setattr("transformers.utils.import_utils.is_cuda_stream_capturing", lambda: True)
    tokens = torch.tensor([3, 4])
    with _Spy() as spy:
        sequences.step(tokens)
    assert spy.seen, "nothing was watched"
    assert spy.seen & _SYNCHRONISING == set()


def test_dynamic_rope_needs_the_host() -> None:
    config = OlmoeConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    assert "dynamic" in (why_not_capturable(config) or "")


@pytest.mark.parametrize(
    ("parameters", "types"),
    [
        (None, {"None"}),
        ({"rope_theta": 10000.0}, {"None"}),
        ({"type": "dynamic", "factor": 2.0}, {"dynamic"}),  # as files of older releases say it
        (
            {"full_attention": {"rope_type": "yarn"}, "sliding_attention": {"rope_type": "dynamic"}},
            {"yarn", "dynamic"},
        ),
    ],
    ids=["none", "no type", "older", "by layer"],
)
def test_rotary_embeddings_of_a_file(parameters: Any, types: set[str]) -> None:
    assert rope_types(parameters) == types


@pytest.mark.parametrize("name", ["Qwen3Moe", "Qwen3Next", "Qwen3_5Moe", "DeepseekV3"])
def test_row_left_out_of_a_step_goes_on_as_if_there_had_been_none(name: str, tmp_path: Path) -> None:
    model: Any = reference_model(build_checkpoint(name, tmp_path))
    prompts = prompt_ids(7, seed=1)[0], prompt_ids(4, seed=2)[0]
    expected = tokens_of(greedy_logits(model, prompts[1], num_steps=6))
    active = torch.ones(2, dtype=torch.bool)
    sequences = StaticSequences(model, rows=2, max_length=32, active=active)
    sequences.prefill(0, prompts[0])
    said = [int(sequences.prefill(1, prompts[1]).argmax())]
    for step in range(6):
        active[1] = False
        sequences.advance(0)
        sequences.step(torch.tensor([5, 9]))
        active[1] = True
        for row in (0, 1):
            sequences.advance(row)
        said.append(int(sequences.step(torch.tensor([step, said[-1]]))[1].argmax()))
    assert said == expected
    assert sequences.lengths.tolist() == [7 + 12, 4 + 6]


@pytest.mark.parametrize("name", [name for name in COVERED if name not in ("Qwen3Next", "Qwen3_5Moe")])
def test_tokens_read_at_once_are_those_read_one_by_one(name: str, tmp_path: Path) -> None:
    """A wrong draft in between is forgotten; other rows are as they were."""
    model: Any = reference_model(build_checkpoint(name, tmp_path))
    prompt, other = prompt_ids(11, seed=1)[0], prompt_ids(5, seed=2)[0]
    logits = greedy_logits(model, prompt, num_steps=12)
    expected, said = torch.stack(logits), torch.tensor(tokens_of(logits))
    sequences = StaticSequences(model, rows=2, max_length=32)
    if sequences.has_states:
        pytest.skip("its states go on token by token")
    sequences.prefill(0, other)
    sequences.prefill(1, prompt)
    wrong = torch.cat([said[:2], (said[2:5] + 1) % 64])
    torch.testing.assert_close(sequences.check(1, wrong)[:2], expected[1:3], rtol=1e-4, atol=1e-4)
    sequences.keep(1, 2)
    torch.testing.assert_close(sequences.check(1, said[2:9]), expected[3:10], rtol=1e-4, atol=1e-4)
    sequences.keep(1, 7)
    assert sequences.lengths.tolist() == [5, 20]
    after = sequences.decode(torch.tensor([7, int(said[9])]))
    torch.testing.assert_close(after[1], expected[10], rtol=1e-4, atol=1e-4)
    alone = StaticSequences(model, rows=1, max_length=32)
    alone.prefill(0, other)
    torch.testing.assert_close(after[0], alone.decode(torch.tensor([7]))[0], rtol=1e-4, atol=1e-4)
