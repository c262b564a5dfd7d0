"""The engine's text is transformers' own: every architecture, every residency, every policy, with images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from hetero_runtime.engine import Engine
from hetero_runtime.plan import read_geometry
from tests import tiny_tokenizer
from tests.architectures import ARCHITECTURES, reference_model
from tests.runtime.engine.answers import Answer, aligned, assert_same_answer, transformers_answer
from tests.runtime.engine.conftest import NUM_TOKENS, PROMPT, MakeAnswer, MakeCheckpoint

POLICIES: dict[str, dict[str, Any]] = {
    "lfu": {"eviction": {"policy": "lfu"}},
    "lfru": {"eviction": {"policy": "lfru"}},
    "per_layer": {"memory": {"pool": "per_layer"}},
    "no prefetch": {"prefetch": {"schedule": "none"}, "prediction": {"predictor": "none"}},
    "first layer pinned": {"memory": {"pinned_prefix": 1}},
    "all pinned": {"memory": {"pinned_prefix": "all", "residency": None, "slabs": 0}},
    "pinned, per_layer, lfru": {
        "memory": {"pinned_prefix": 1, "pool": "per_layer"},
        "eviction": {"policy": "lfru"},
    },
}


def memory_of(residency: str, folder: Path) -> dict[str, Any]:
    """The `memory` section for `residency`: smallest (a token's top-k slabs, for all layers), 25 % or all."""
    slabs = {"smallest": read_geometry(folder).top_k, "all": "all"}
    return {"residency": 0.25} if residency == "25%" else {"slabs": slabs[residency]}


def load(folder: Path, device: str, **overrides: Any) -> Engine:
    overrides = {"execution": {"mode": "eager", "max_rows": 2, "max_length": 256}, **overrides}
    return Engine.load(folder, device=device, **overrides)


@pytest.mark.parametrize("residency", ["smallest", "25%", "all"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_at_every_residency(
    name: str,
    residency: str,
    device: str,
    *,
    checkpoint: MakeCheckpoint,
    answer: MakeAnswer,
    logits: list[torch.Tensor],
) -> None:
    folder = checkpoint(name)
    with load(folder, device, memory=memory_of(residency, folder)) as engine:
        completion = engine.generate(PROMPT[0].tolist(), max_tokens=NUM_TOKENS, ignore_eos=True)
        engine.check()
    assert_same_answer(completion.token_ids, logits, answer(name, device), device=device)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["Qwen3Moe", "DeepseekV3", "GptOss"])
def test_no_policy_changes_a_token(
    name: str,
    policy: str,
    device: str,
    *,
    checkpoint: MakeCheckpoint,
    answer: MakeAnswer,
    logits: list[torch.Tensor],
) -> None:
    settings = POLICIES[policy]
    memory = {"residency": 0.4, **settings.get("memory", {})}
    with load(checkpoint(name), device, **{**settings, "memory": memory}) as engine:
        completion = engine.generate(PROMPT[0].tolist(), max_tokens=NUM_TOKENS, ignore_eos=True)
        engine.check()
    assert_same_answer(completion.token_ids, logits, answer(name, device), device=device)


@pytest.mark.parametrize("residency", ["smallest", "all"])
@pytest.mark.parametrize("name", ["Qwen3Moe", "DeepseekV2", "Qwen3VLMoe"])
def test_bfloat16(
    name: str,
    residency: str,
    *,
    checkpoint: MakeCheckpoint,
    answer: MakeAnswer,
    logits: list[torch.Tensor],
) -> None:
    folder = checkpoint(name, torch.bfloat16)
    with load(folder, "cpu", memory=memory_of(residency, folder)) as engine:
        assert engine.config.model.dtype == "bfloat16"
        completion = engine.generate(PROMPT[0].tolist(), max_tokens=NUM_TOKENS, ignore_eos=True)
    assert_same_answer(completion.token_ids, logits, answer(name, "cpu", torch.bfloat16), device="cpu")


@pytest.mark.parametrize("name", ["DeepseekV2", "Qwen3VLMoe"])
def test_another_dtype_than_the_checkpoints(
    name: str, checkpoint: MakeCheckpoint, logits: list[torch.Tensor]
) -> None:
    folder = checkpoint(name)
    reference = aligned(reference_model(folder, dtype=torch.bfloat16))
    with load(folder, "cpu", memory={"residency": 0.25}, model={"dtype": "bfloat16"}) as engine:
        completion = engine.generate(PROMPT[0].tolist(), max_tokens=NUM_TOKENS, ignore_eos=True)
    expected = transformers_answer(reference, {"input_ids": PROMPT}, num_tokens=NUM_TOKENS)
    assert_same_answer(completion.token_ids, logits, expected, device="cpu")


# ---- images

Messages = list[dict[str, Any]]


def picture(side: int = 64, *, seed: int = 0) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def interleaved(*parts: str | Image.Image) -> Messages:
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


def about(text: str, *images: Image.Image) -> Messages:
    return interleaved(text, *images)


def chat_inputs(folder: Path, messages: Messages) -> dict[str, torch.Tensor]:
    """What transformers takes for a chat, its image place-holders expanded by hand."""
    images = [part["image"] for part in messages[0]["content"] if part["type"] == "image"]
    template_ids = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    inputs: dict[str, torch.Tensor] = {}
    if images:
        inputs = dict(
            AutoImageProcessor.from_pretrained(folder, backend="pil")(images=images, return_tensors="pt")
        )
    patches = iter(inputs["image_grid_thw"].prod(-1).tolist() if images else ())
    ids: list[int] = []
    for token in template_ids:
        ids += [token] * (next(patches) // 4 if token == tiny_tokenizer.IMAGE else 1)  # merged two by two
    input_ids = torch.tensor([ids])
    if images:
        inputs["mm_token_type_ids"] = (input_ids == tiny_tokenizer.IMAGE).int()
    return {"input_ids": input_ids, **inputs}


def expected_answer(
    folder: Path, messages: Messages, device: str, *, dtype: torch.dtype = torch.float32
) -> Answer:
    """transformers' answer to the same chat."""
    model = aligned(reference_model(folder, dtype=dtype)).to(device)
    return transformers_answer(model, chat_inputs(folder, messages), num_tokens=NUM_TOKENS)


@pytest.mark.parametrize(
    "messages",
    [
        about("what is this?", picture()),
        about("compare", picture(64, seed=1), picture(96, seed=2)),
        interleaved("first", picture(64, seed=1), "then", picture(96, seed=2), "compare"),
        about("no picture here"),
    ],
    ids=["one image", "two images", "between text", "text only"],
)
@pytest.mark.parametrize("residency", ["smallest", "25%", "all"])
def test_images_are_seen_as_transformers_sees_them(
    residency: str,
    messages: Messages,
    device: str,
    *,
    checkpoint: MakeCheckpoint,
    logits: list[torch.Tensor],
) -> None:
    folder = checkpoint("Qwen3VLMoe")
    with load(folder, device, memory=memory_of(residency, folder)) as engine:
        completion = engine.generate(messages, max_tokens=NUM_TOKENS, ignore_eos=True)
        engine.check()
    assert_same_answer(completion.token_ids, logits, expected_answer(folder, messages, device), device=device)


def test_images_in_bfloat16(checkpoint: MakeCheckpoint, logits: list[torch.Tensor]) -> None:
    folder, messages = checkpoint("Qwen3VLMoe", torch.bfloat16), about("what is this?", picture())
    with load(folder, "cpu", memory={"residency": 0.25}) as engine:
        completion = engine.generate(messages, max_tokens=NUM_TOKENS, ignore_eos=True)
    expected = expected_answer(folder, messages, "cpu", dtype=torch.bfloat16)
    assert_same_answer(completion.token_ids, logits, expected, device="cpu")


def test_an_image_changes_the_answer(checkpoint: MakeCheckpoint) -> None:
    with load(checkpoint("Qwen3VLMoe"), "cpu") as engine:
        answers = {
            engine.generate(about("what?", picture(seed=seed)), max_tokens=8, ignore_eos=True).token_ids
            for seed in range(3)
        }
    assert len(answers) == 3


def test_interleaved_requests_keep_their_own_positions(checkpoint: MakeCheckpoint, device: str) -> None:
    """transformers keeps the position offset that an image causes on the model: it must not leak."""
    chats = [about("what is this?", picture()), about("and this", picture(128, seed=3)), about("only text")]
    execution = {"mode": "eager", "max_rows": 3}
    with load(checkpoint("Qwen3VLMoe"), device, memory={"residency": 0.25}, execution=execution) as engine:
        alone = [engine.generate(chat, max_tokens=16, ignore_eos=True).token_ids for chat in chats]
        streams = [engine.stream(chat, max_tokens=16, ignore_eos=True) for chat in chats]
        steps = [[delta.token_id for delta in step] for step in zip(*streams, strict=True)]
        together = list(zip(*steps, strict=True))
        engine.check()
    assert together == alone
