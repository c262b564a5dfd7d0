"""A small model drafts what it would say itself, whatever happened to its drafts before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hetero_runtime.errors import CheckpointError
from hetero_runtime.generation import SamplingParams
from hetero_runtime.hf.drafter import load_drafter
from hetero_runtime.hf.tokens import load_tokenizer
from hetero_runtime.speculation.autoregressive import AutoregressiveDrafter
from tests import tiny_tokenizer
from tests.architectures import prompt_ids
from tests.runtime.speculation.drafters import build_drafter

CPU = torch.device("cpu")
FEWER = tiny_tokenizer.VOCAB_SIZE - 4
PROMPT = (prompt_ids(11)[0] % FEWER).tolist()
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": {"sliding_window": 6},
    "short context": {"max_position_embeddings": 24},
    "fewer logits": {"vocab_size": FEWER},
    "more logits": {"vocab_size": tiny_tokenizer.VOCAB_SIZE + 8},
}


@pytest.fixture(params=KINDS)
def drafter_of(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[AutoregressiveDrafter, Any]:
    """A drafter, and the same model as plain transformers."""
    folder = build_drafter(tmp_path / "drafter", **KINDS[request.param])
    model = load_drafter(str(folder), load_tokenizer(folder), dtype="float32", device=CPU)
    drafter = AutoregressiveDrafter(model, vocab_size=tiny_tokenizer.VOCAB_SIZE, device=CPU)
    return drafter, transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def goes_on(model: Any, history: list[int], count: int) -> tuple[int, ...]:
    """What the plain model says after `history`, greedily, of the words there are."""
    text = list(history)
    for _ in range(min(count, model.config.max_position_embeddings - len(history))):
        logits = model(torch.tensor([text])).logits[0, -1, : tiny_tokenizer.VOCAB_SIZE]
        text.append(int(logits.argmax()))
    return tuple(text[len(history) :])


def likelihoods(model: Any, history: list[int], tokens: tuple[int, ...]) -> list[float]:
    """How likely the plain model holds each of `tokens` to be after those before it."""
    if not tokens:
        return []
    logits = model(torch.tensor([[*history, *tokens]])).logits[0, len(history) - 1 : -1]
    spoken = torch.softmax(logits[:, : tiny_tokenizer.VOCAB_SIZE].float(), -1)
    return [float(spoken[i, token]) for i, token in enumerate(tokens)]


@torch.inference_mode()
def test_greedy_drafts_are_the_models_own_text(drafter_of: tuple[AutoregressiveDrafter, Any]) -> None:
    drafter, model = drafter_of
    history, other = list(PROMPT), (prompt_ids(40, seed=5)[0] % FEWER).tolist()
    with drafter.open(SamplingParams(), lambda: None) as row:
        for num_accepted in (0, 3, 1, 5, 2, 0, 4):
            draft = row.draft(history, 5)
            assert draft.token_ids == goes_on(model, history, 5)
            assert draft.probabilities is None
            likely = likelihoods(model, history, draft.token_ids)
            assert list(draft.confidences or ()) == pytest.approx(likely, rel=1e-4)
            history += [*draft.token_ids[:num_accepted], other.pop()]


def test_after_a_token_that_it_cannot_read_it_drafts_nothing(tmp_path: Path) -> None:
    folder = build_drafter(tmp_path, vocab_size=FEWER)
    model = load_drafter(str(folder), load_tokenizer(folder), dtype="float32", device=CPU)
    drafter = AutoregressiveDrafter(model, vocab_size=tiny_tokenizer.VOCAB_SIZE, device=CPU)
    with drafter.open(SamplingParams(), lambda: None) as row:
        assert len(row.draft(PROMPT, 3).token_ids) == 3
        assert row.draft([*PROMPT, FEWER], 3).token_ids == ()
        assert row.draft([*PROMPT, FEWER, 9], 3).token_ids == ()


def test_sampled_drafts_say_what_they_were_drawn_from(drafter_of: tuple[AutoregressiveDrafter, Any]) -> None:
    drafter, _ = drafter_of
    params = SamplingParams(temperature=0.8, top_k=20, seed=1)
    with drafter.open(params, lambda: None) as row:
        draft = row.draft(PROMPT, 4)
    assert draft.probabilities is not None
    assert draft.probabilities.shape == (4, tiny_tokenizer.VOCAB_SIZE)
    assert torch.allclose(draft.probabilities.sum(-1), torch.ones(4))
    assert (draft.probabilities > 0).sum(-1).tolist() == [20] * 4
    drawn = [float(draft.probabilities[i, token]) for i, token in enumerate(draft.token_ids)]
    assert min(drawn) > 0
    assert draft.confidences == tuple(drawn)


def test_a_seed_drafts_the_same_again_and_no_word_of_what_the_model_draws(tmp_path: Path) -> None:
    """Were both drawn from one stream, an accepted draft would say what is drawn next."""
    folder = build_drafter(tmp_path)
    model = load_drafter(str(folder), load_tokenizer(folder), dtype="float32", device=CPU)
    drafter = AutoregressiveDrafter(model, vocab_size=tiny_tokenizer.VOCAB_SIZE, device=CPU)

    def drafted(seed: int) -> tuple[int, ...]:
        with drafter.open(SamplingParams(temperature=1.0, seed=seed), lambda: None) as row:
            return row.draft(PROMPT, 6).token_ids

    assert drafted(7) == drafted(7) != drafted(8)
    from hetero_runtime.generation import make_sampler

    with torch.inference_mode():
        plain = make_sampler(SamplingParams(temperature=1.0, seed=7), tiny_tokenizer.VOCAB_SIZE, CPU)
        text = list(PROMPT)
        for _ in range(6):
            text.append(plain.sample(model(torch.tensor([text])).logits[0, -1], text))
    assert tuple(text[len(PROMPT) :]) != drafted(7)


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = build_drafter(tmp_path / "drafter")
    theirs = build_drafter(tmp_path / "model")
    file = theirs / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"speculation\.model.*2 words differ, such as 'a'"):
        load_drafter(str(folder), load_tokenizer(theirs), dtype="float32", device=CPU)


def test_a_folder_that_holds_no_model_is_refused(tmp_path: Path) -> None:
    folder = build_drafter(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="transformers cannot load the drafter"):
        load_drafter(str(folder), load_tokenizer(folder), dtype="float32", device=CPU)
