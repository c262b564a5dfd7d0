"""The widened model says what the small one says: same choices of routers, same logits, up to rounding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from PIL import Image
from transformers import Qwen3VLMoeForConditionalGeneration

from bench.vl.drawing import NUM_CELLS
from bench.vl.held_out import MODEL
from bench.vl.mosaic import draw_mosaics
from bench.vl.wide_checkpoint import ensure_widened
from bench.vl.wide_geometry import WideGeometry
from hetero_runtime.generation import SamplingParams
from hetero_runtime.hf.tokens import load_tokenizer
from hetero_runtime.prompt import PromptReader

SMALL_EXPERTS = 64
WIDE = WideGeometry(
    hidden=512, heads=16, intermediate=32, vision_hidden=576, vision_heads=8, vision_intermediate=400
)
"""Heads are as large as the full geometry's: 128, and 72 in the encoder."""


class Said(NamedTuple):
    """By one model of one prompt."""

    logits: torch.Tensor  # [T, vocab]
    chosen: torch.Tensor  # [L, T, k], ascending


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_widened(tmp_path_factory.mktemp("wide"), WIDE)


def said_by(folder: Path, image: Image.Image) -> Said:
    model = Qwen3VLMoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    chosen: list[torch.Tensor] = []
    for layer in model.model.language_model.layers:
        layer.mlp.gate.register_forward_hook(lambda _m, _given, said: chosen.append(said[2].sort().values))
    reader = PromptReader(
        folder, tokenizer=load_tokenizer(folder), config=model.config, has_images=True, max_length=1000
    )
    parts: list[Any] = [{"type": "image", "image": image}, {"type": "text", "text": "What do you see?"}]
    read = reader.read([{"role": "user", "content": parts}], SamplingParams(max_tokens=1))
    assert read.images is not None
    assert int(read.images["mm_token_type_ids"].sum()) == NUM_CELLS
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([read.ids]), **read.images).logits[0]
    return Said(logits, torch.stack(chosen))


def test_the_same_choices_and_logits(folder: Path) -> None:
    image = draw_mosaics(1, side=1, wider=1, split="seeds")[0].image
    twice = image.resize((2 * image.width, 2 * image.height), Image.Resampling.NEAREST)
    small, wide = said_by(MODEL, image), said_by(folder, twice)
    assert (small.logits - wide.logits).norm() < 0.01 * small.logits.norm()
    halves = wide.chosen.view(*small.chosen.shape[:2], 2, -1)
    assert torch.equal(halves[:, :, 0], halves[:, :, 1] - SMALL_EXPERTS)  # an expert in both of its halves
    assert (halves[:, :, 0] == small.chosen).double().mean() > 0.98


def test_another_geometry_is_written_anew(folder: Path) -> None:
    written = (folder / "config.json").stat().st_mtime_ns
    assert ensure_widened(folder, WIDE) == folder
    assert (folder / "config.json").stat().st_mtime_ns == written
    config = json.loads((folder / "config.json").read_text())
    assert config["text_config"]["num_experts_per_tok"] == 8
    assert config["text_config"]["rope_parameters"]["mrope_section"] == [24, 20, 20]


def test_mosaics_have_as_many_tokens_as_scenes_have() -> None:
    first, second = draw_mosaics(2, side=2, wider=1, split="seeds")
    assert first.image.size == (384, 384)
    assert first.answer.count(", ") > 2
    assert first.image.tobytes() != second.image.tobytes()
    (scene,) = draw_mosaics(1, side=1, wider=1, split="seeds")
    assert scene.image.tobytes() == first.image.crop((0, 0, 192, 192)).tobytes()
    assert draw_mosaics(1, side=1, wider=1, split="train")[0].image.tobytes() != scene.image.tobytes()
