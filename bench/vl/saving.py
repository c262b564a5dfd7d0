"""The folder that ships: weights in bf16, tokenizer, chat template, image processor, generation defaults."""

from __future__ import annotations

import copy
import io
import json
import os
import tarfile
from pathlib import Path

from tokenizers import Tokenizer
from transformers import GenerationConfig, Qwen3VLMoeForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from bench.models import chat
from bench.models.tokenizer import PAD
from bench.vl.geometry import MERGE, PATCH
from bench.vl.scenes import SIZE
from bench.vl.text import wrap_tokenizer

_SHARD_SIZE = "12MB"
_PIXELS = SIZE * SIZE
NUM_PARTS = 3
PROCESSOR = "PaddleOCRVLProcessor"
"""One of transformers' for pictures alone, counting visual tokens alike. Qwen3-VL's own, for videos too,
wants torchvision."""


def as_shipped(
    model: Qwen3VLMoeForConditionalGeneration, tokenizer: Tokenizer
) -> Qwen3VLMoeForConditionalGeneration:
    """A bf16 copy of a model in training, with generation defaults: what is measured is what ships."""
    with model.device:
        fresh = Qwen3VLMoeForConditionalGeneration(copy.deepcopy(model.config))
    fresh.load_state_dict(model.state_dict())
    for weight in fresh.parameters():  # buffers stay in float32, as transformers loads them
        weight.data = weight.data.bfloat16()
    fresh.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=tokenizer.token_to_id(chat.END),
        pad_token_id=tokenizer.token_to_id(PAD),
    )
    return fresh.eval()


def save_model(shipped: Qwen3VLMoeForConditionalGeneration, tokenizer: Tokenizer, folder: Path) -> None:
    """Write configuration, safetensors shards of 12 MB, tokenizer and processor."""
    shipped.save_pretrained(folder, max_shard_size=_SHARD_SIZE)
    wrap_tokenizer(tokenizer, shipped.config.text_config.max_position_embeddings).save_pretrained(folder)
    image_processor().save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": PROCESSOR}) + "\n")


def image_processor() -> Qwen2VLImageProcessorPil:
    """Turns any picture into about as many pixels as training pictures have."""
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=MERGE,
        temporal_patch_size=2,
        size={"shortest_edge": _PIXELS, "longest_edge": _PIXELS},
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )


def write_parts(folder: Path, out: Path) -> None:
    """`folder` as a tar in `out`, cut in three: `cat model.tar.* | tar x` puts it together.

    Each part replaces its forerunner only when all are written.
    """
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.add(folder, arcname=folder.name)
    content = archive.getvalue()
    size = -(-len(content) // NUM_PARTS)
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"model.tar.{part}" for part in range(NUM_PARTS)]
    for part, path in enumerate(paths):
        path.with_name(path.name + ".new").write_bytes(content[part * size : (part + 1) * size])
    for path in paths:
        os.replace(path.with_name(path.name + ".new"), path)
