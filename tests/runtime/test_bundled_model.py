"""The bundled model as it ships: small enough, loadable, and able to go on with a story."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, Qwen3MoeForCausalLM

from hetero_runtime.bundled import model_path
from hetero_runtime.calibration import locate_calibration, read_calibration
from hetero_runtime.config.tree import PredictionConfig, RoutingConfig
from hetero_runtime.engine import Engine
from hetero_runtime.lookahead.locate import locate_lookahead
from hetero_runtime.plan import read_geometry
from hetero_runtime.prediction import RouterFingerprint, read_predictor
from hetero_runtime.prediction.locate import locate_predictor
from hetero_scheduler.trace import load_entropies

STORY = (
    "Once upon a time there was a kind girl named Wendy. Soft rain fell on the roof. Wendy had a small "
    "green kite. She loved the kite very much and played with it every day."
)


@pytest.fixture(scope="module")
def model() -> Qwen3MoeForCausalLM:
    loaded = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32)
    assert isinstance(loaded, Qwen3MoeForCausalLM)
    return loaded


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(model_path())


def greedy(model: Any, tokenizer: PreTrainedTokenizerBase, prompt: str, tokens: int) -> str:
    """The greedy continuation of a prompt, special tokens kept."""
    batch = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    length = batch["input_ids"].shape[1]
    written = model.generate(**batch, max_new_tokens=tokens, do_sample=False, temperature=None, top_p=None)
    text = tokenizer.decode(written[0, length:])
    assert isinstance(text, str)
    return text


def test_the_package_stays_under_forty_megabytes() -> None:
    files = [path for path in model_path().iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 40 * 2**20
    assert max(path.stat().st_size for path in files) < 12e6
    assert (model_path() / "MODEL_CARD.md").exists()


def test_its_lookahead_predictor_lies_beside_it_and_is_its_own() -> None:
    located = locate_lookahead(
        PredictionConfig(predictor="lookahead_mlp"), read_geometry(model_path()), device="cpu"
    )
    assert located is not None
    assert located.path.parent == model_path().parent
    assert located.path.stat().st_size < 1e6
    texts = []
    for preset in ("lru", "vismmoe"):
        memory = {"residency": 0.5}
        with Engine.load(model_path(), preset=preset, device="cpu", memory=memory) as engine:
            texts.append(engine.generate(STORY, max_tokens=8).text)
            assert (engine.config.memory.pinned_prefix > 0) == (preset == "vismmoe")
    assert texts[0] == texts[1]


def test_its_calibration_lies_beside_it_and_is_its_own() -> None:
    geometry = read_geometry(model_path())
    path = locate_calibration(RoutingConfig(policy="psr"), geometry)
    assert path is not None
    assert path.parent == model_path().parent
    assert path.stat().st_size < 300e3
    stored = read_calibration(path, RouterFingerprint.of_model(geometry))
    assert stored.notes["num_tokens"] > 100_000
    uses = stored.calibration.uses
    assert (uses.sum(axis=1) == uses[0].sum()).all()
    assert load_entropies(uses).mean() > 0.95


def test_its_predictor_lies_beside_it_and_is_its_own() -> None:
    geometry = read_geometry(model_path())
    located = locate_predictor(PredictionConfig("mamba2"), geometry)
    assert located is not None
    assert located.path.parent == model_path().parent
    assert located.num_bytes < 2.5e6
    stored = read_predictor(located.path, RouterFingerprint.of_model(geometry))
    assert stored.notes["trace"]["load_entropy"] > 0.95


def test_weights_are_bf16_and_experts_the_larger_part() -> None:
    loaded = AutoModelForCausalLM.from_pretrained(model_path())
    assert {weight.dtype for weight in loaded.parameters()} == {torch.bfloat16}
    experts = sum(weight.numel() for name, weight in loaded.named_parameters() if ".experts." in name)
    assert experts / loaded.num_parameters() > 0.8


def test_story_text_is_expected(model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    batch = tokenizer(STORY, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        loss = model(**batch, labels=batch["input_ids"]).loss
    assert loss < 1.5  # log(6144) = 8.7 would be a guess


def test_story_goes_on_in_words(model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    text = greedy(model, tokenizer, STORY, 60)
    words = re.findall(r"[A-Za-z]+", text)
    assert text.isascii()
    assert len(words) >= 30
    assert {"the", "said", "and"} & set(words)


def test_chat_answers_and_ends_its_turn(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 12 plus 45?"}], tokenize=False, add_generation_prompt=True
    )
    assert isinstance(prompt, str)
    assert greedy(model, tokenizer, prompt, 40) == "12 plus 45 is 57.<|end|>"
