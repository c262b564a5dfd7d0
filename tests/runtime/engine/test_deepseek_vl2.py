"""DeepSeek-VL2 in an engine says what the resident model says: every variant and residency, with images."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hetero_runtime.config import load_config
from hetero_runtime.engine import Engine
from hetero_runtime.errors import RequestError
from hetero_runtime.generation import SamplingParams
from hetero_runtime.hf.forward import SequenceState
from hetero_runtime.hf.reference import load_reference
from hetero_runtime.hf.sequences import StaticSequences
from hetero_runtime.hf.tokens import load_tokenizer
from hetero_runtime.planned import plan_for, three_residencies
from hetero_runtime.prompt import PromptReader, ReadPrompt
from tests.deepseek_vl2_checkpoints import IMAGE, VARIANTS, build_deepseek_vl2
from tests.runtime.hf.plain import greedy_logits, tokens_of

NUM_TOKENS = 24
Messages = list[dict[str, Any]]
MakeFolder = Callable[..., Path]


def picture(width: int, height: int) -> dict[str, Any]:
    pixels = np.random.default_rng(width).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return {"type": "image", "image": Image.fromarray(pixels)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def chat(*parts: dict[str, Any]) -> Messages:
    return [{"role": "user", "content": list(parts)}]


CHATS: dict[str, Messages] = {
    "one image": chat(picture(60, 30), text("what is this?")),
    "two images between text": chat(text("a"), picture(20, 28), text("or"), picture(28, 50), text("b?")),
    "three images": chat(*(picture(30 + side, 40) for side in range(3)), text("alike?")),
    "text only": chat(text("no picture here")),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> MakeFolder:
    @cache
    def build(variant: str, dtype: torch.dtype = torch.float32) -> Path:
        return build_deepseek_vl2(variant, tmp_path_factory.mktemp(variant), dtype=dtype)

    return build


def resident(folder: Path, dtype: str) -> Any:
    return load_reference(folder, dtype=dtype, device=torch.device("cpu"))


def read(folder: Path, model: Any, messages: Messages) -> ReadPrompt:
    reader = PromptReader(
        folder, tokenizer=load_tokenizer(folder), config=model.config, has_images=True, max_length=512
    )
    return reader.read(messages, SamplingParams(max_tokens=NUM_TOKENS))


def expected_logits(folder: Path, dtype: str) -> dict[str, torch.Tensor]:
    """By chat, `[NUM_TOKENS, vocab]`. The head is shown the last token alone, as in an engine: how many it is
    shown decides the last bits."""
    model, expected = resident(folder, dtype), {}
    for name, messages in CHATS.items():
        prompt, state = read(folder, model, messages), SequenceState(model)
        logits = [state.extend(torch.tensor(prompt.ids), prompt.images)]
        while len(logits) < NUM_TOKENS:
            logits.append(state.extend(logits[-1].argmax()[None]))
        expected[name] = torch.stack(logits)
    return expected


def assert_engine_agrees(folder: Path, dtype: str, logits: list[torch.Tensor]) -> None:
    expected = expected_logits(folder, dtype)
    config = load_config({"model": {"path": str(folder)}, "device": "cpu"})
    for planned in map(plan_for, three_residencies(config)):
        memory = {"slabs": planned.config.memory.slabs}
        with Engine.load(folder, device="cpu", memory=memory, execution={"max_length": 512}) as engine:
            for name, messages in CHATS.items():
                logits.clear()
                completion = engine.generate(messages, max_tokens=NUM_TOKENS, ignore_eos=True)
                assert list(completion.token_ids) == tokens_of(list(expected[name])), (memory, name)
                assert torch.equal(torch.stack(logits), expected[name]), (memory, name)
            engine.check()


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_at_every_residency(
    variant: str, folder: MakeFolder, logits: list[torch.Tensor]
) -> None:
    assert_engine_agrees(folder(variant), "float32", logits)


@pytest.mark.parametrize("variant", ["tiny", "large"])
def test_bfloat16(variant: str, folder: MakeFolder, logits: list[torch.Tensor]) -> None:
    assert_engine_agrees(folder(variant, torch.bfloat16), "bfloat16", logits)


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_of_a_fixed_cache_say_the_same(variant: str, folder: MakeFolder) -> None:
    """What a captured step is made of, uncaptured."""
    model = resident(folder(variant), "float32")
    prompt = read(folder(variant), model, CHATS["one image"])
    ids = torch.tensor(prompt.ids)
    expected = tokens_of(greedy_logits(model, ids, num_steps=NUM_TOKENS, images=prompt.images))
    sequences = StaticSequences(model, rows=2, max_length=256)
    said = [int(sequences.prefill(1, ids, prompt.images).argmax())]
    while len(said) < len(expected):
        said.append(int(sequences.decode(torch.tensor([0, said[-1]]))[1].argmax()))
    assert said == expected


def test_an_image_changes_the_answer(folder: MakeFolder) -> None:
    with Engine.load(folder("small"), device="cpu") as engine:
        answers = {
            engine.generate(chat(picture(28 + side, 28)), max_tokens=8, ignore_eos=True).token_ids
            for side in range(3)
        }
    assert len(answers) == 3


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (
            chat(*[picture(90, 90)] * 2),
            r"\(\d+ of them for images\) and max_tokens is 4: .* give smaller or fewer",
        ),
        ([IMAGE], "the prompt has 1 image place-holders and 0 images"),
        (chat(text("<image>"), picture(9, 9)), "the prompt has 2 image place-holders and 1 images"),
        (chat({"type": "image", "image": "AAAA"}), "is no image that can be read"),
    ],
    ids=["over the context", "no image", "one image", "corrupt"],
)
def test_bad_images(prompt: Any, message: str, folder: MakeFolder) -> None:
    with Engine.load(folder("tiny"), device="cpu", execution={"max_length": 256}) as engine:
        with pytest.raises(RequestError, match=message):
            engine.generate(prompt, max_tokens=4)
        assert engine.generate("hi", max_tokens=4, ignore_eos=True).token_ids
