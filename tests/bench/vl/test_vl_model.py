"""The trained model in `bench/vl/model`: it loads, its card tells what it is, and it answers rightly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3VLMoeForConditionalGeneration

from bench.vl.held_out import MEASURED, MODEL, Asked, ask_each
from bench.vl.model_card import read_summary, write_card
from hetero_runtime import Engine

LIMIT_BYTES = 40 << 20


@pytest.fixture(scope="module")
def asked() -> list[Asked]:
    return [question for kind in MEASURED for question in ask_each(kind, 2)]


def test_it_stays_small() -> None:
    assert sum(path.stat().st_size for path in MODEL.iterdir()) < LIMIT_BYTES


def test_its_card_is_that_of_its_training(tmp_path: Path) -> None:
    summary = read_summary(MODEL / "train.json")
    write_card(summary, tmp_path / "MODEL_CARD.md")
    assert (tmp_path / "MODEL_CARD.md").read_text() == (MODEL / "MODEL_CARD.md").read_text()
    seeds = summary.held_out["seeds"]
    assert all(seeds.accuracy(kind) > 0.9 for kind in MEASURED)
    assert min(seeds.load_entropy) > 0.9


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_engine_answers_held_out_questions(asked: list[Asked]) -> None:
    memory, execution = {"residency": 0.5}, {"max_length": 256, "max_rows": 1}
    with Engine.load(MODEL, device="cpu", memory=memory, execution=execution) as engine:
        said = [engine.generate(each.messages, max_tokens=16, temperature=0.0).text for each in asked]
    answers = zip(asked, said, strict=True)
    wrong = [(each.question, answer) for each, answer in answers if answer != each.question.answer]
    assert len(wrong) <= 1, wrong


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_transformers_answers_them_too(asked: list[Asked], load_processor: Any) -> None:
    processor = load_processor(MODEL)
    model = Qwen3VLMoeForConditionalGeneration.from_pretrained(MODEL, dtype=torch.float32)
    for each in asked[::2]:  # one of a kind
        inputs = processor.apply_chat_template(
            each.messages, tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        written = model.generate(**inputs, max_new_tokens=16)[0, inputs["input_ids"].shape[1] :]
        assert processor.decode(written, skip_special_tokens=True) == each.question.answer
