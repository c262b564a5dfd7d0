"""The tiny checkpoints are fit to test with: they load, route widely, and do not repeat one token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests import tiny_tokenizer
from tests.architectures import ARCHITECTURES, build_checkpoint, image_inputs, prompt_ids, reference_model

NUM_NEW_TOKENS = 64


def _expert_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith(".experts")]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_checkpoint_loads_routes_widely_and_does_not_repeat(name: str, tmp_path: Path) -> None:
    model = reference_model(build_checkpoint(name, tmp_path))
    inputs = image_inputs() if name == "Qwen3VLMoe" else {"input_ids": prompt_ids(17)}
    chosen: list[torch.Tensor] = []
    modules = _expert_modules(model)
    hooks = [m.register_forward_pre_hook(lambda _module, args: chosen.append(args[1])) for m in modules]
    with torch.no_grad():
        logits = model(**inputs).logits[0]
    for hook in hooks:
        hook.remove()

    assert len(modules) == len(chosen) >= 2
    for top_k_index in chosen:  # [tokens, top_k]
        assert top_k_index.unique().numel() > top_k_index.shape[-1]
    assert logits.isfinite().all()
    assert logits.argmax(-1).unique().numel() >= 5

    tokens = model.generate(**inputs, max_new_tokens=NUM_NEW_TOKENS, do_sample=False)
    new = tokens[0, inputs["input_ids"].shape[1] :]
    assert new.numel() == NUM_NEW_TOKENS
    assert new.unique().numel() >= 16


def test_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    first, second, other = (
        load_file(build_checkpoint("Olmoe", tmp_path / folder, seed=seed) / "model.safetensors")
        for folder, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_on_disk_have_the_dtype_asked_for(dtype: torch.dtype, tmp_path: Path) -> None:
    weights = load_file(build_checkpoint("Olmoe", tmp_path, dtype=dtype) / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {dtype}


@pytest.mark.parametrize("name", ["Qwen3Moe", "Mixtral"])
def test_some_checkpoints_are_sharded(name: str, tmp_path: Path) -> None:
    folder = build_checkpoint(name, tmp_path)
    assert (folder / "model.safetensors.index.json").is_file()
    assert len(list(folder.glob("model-*.safetensors"))) > 2


def test_mixtral_keeps_the_names_of_published_checkpoints(tmp_path: Path) -> None:
    folder = build_checkpoint("Mixtral", tmp_path)
    names = {name for file in folder.glob("*.safetensors") for name in load_file(file)}
    assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in names


@pytest.mark.parametrize(("name", "is_ragged"), [("Qwen3MoeFp8", False), ("Qwen3MoeFp8Ragged", True)])
def test_fp8_experts_are_stored_in_blocks(name: str, is_ragged: bool, tmp_path: Path) -> None:
    folder = build_checkpoint(name, tmp_path)
    weights = load_file(folder / "model.safetensors")
    expert = "model.layers.0.mlp.experts.0.gate_proj.weight"
    assert weights[expert].dtype == torch.float8_e4m3fn
    rows, columns = weights[expert].shape
    assert weights[f"{expert}_scale_inv"].shape == (-(-rows // 16), -(-columns // 16))
    assert (rows % 16 != 0) == is_ragged == (folder / "dequantized").is_dir()


def test_mxfp4_experts_are_stored_in_groups_of_32(tmp_path: Path) -> None:
    weights = load_file(build_checkpoint("GptOssMxfp4", tmp_path) / "model.safetensors")
    assert weights["model.layers.0.mlp.experts.gate_up_proj_blocks"].shape == (8, 64, 2, 16)
    assert weights["model.layers.0.mlp.experts.gate_up_proj_scales"].shape == (8, 64, 2)


@pytest.mark.parametrize(
    ("name", "plain", "tolerance"), [("Qwen3MoeFp8", "Qwen3Moe", 0.05), ("GptOssMxfp4", "GptOss", 0.2)]
)
def test_quantised_weights_stay_near_the_float_ones(
    name: str, plain: str, tolerance: float, tmp_path: Path
) -> None:
    quantised, original = (
        reference_model(build_checkpoint(each, tmp_path / each)).model.layers[0].mlp.experts.gate_up_proj
        for each in (name, plain)
    )
    assert (quantised - original).norm() / original.norm() < tolerance


def test_tokenizer_covers_any_text_and_the_chat_template_marks_turns(tmp_path: Path) -> None:
    tiny_tokenizer.save_tokenizer(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == tiny_tokenizer.VOCAB_SIZE
    text = "Grüße, 世界! 🙂\n\tx = 1"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token_id == tiny_tokenizer.END
    picture = [{"type": "text", "text": "see "}, {"type": "image"}]
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    chat += [{"role": "user", "content": picture}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|user|>hi<|end|>yes<|end|><|user|>see <|vision_start|><|image_pad|><|vision_end|><|end|><|begin|>"
    )
