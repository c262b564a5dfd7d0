"""Answers of a tiny model: likelihoods as plain transformers has them, text as the engine generates it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from hetero_runtime.assembly import Parts
from hetero_runtime.engine import Engine
from hetero_runtime.errors import RequestError
from hetero_runtime.evaluation.harness import Harness
from hetero_runtime.evaluation.tasks.requests import sampling_params
from hetero_runtime.evaluation.tasks.served import AnswersDone, ServedAnswers
from hetero_runtime.evaluation.tasks.spans import SpanReader, begin_token
from hetero_runtime.hf.forward import SequenceState
from tests.runtime.evaluation.conftest import PartsOf


def make_answers(parts: Parts, answered: AnswersDone | None = None) -> ServedAnswers:
    reader = SpanReader(parts.tokenizer, begin_token=begin_token(parts.tokenizer), max_length=128)
    return ServedAnswers(
        parts.tokenizer,
        reader,
        open_harness=lambda: nullcontext(Harness(parts)),
        open_engine=lambda: nullcontext(Engine(parts)),
        answered=answered,
    )


@pytest.fixture
def answers(parts_of: PartsOf) -> ServedAnswers:
    return make_answers(parts_of("Qwen3Moe"))


def log_likelihood(parts: Any, row: list[int], begin: int) -> float:
    """Of `row[begin:]`, a token at a time."""
    state = SequenceState(parts.model)
    said = [torch.log_softmax(state.extend(torch.tensor([token])), -1) for token in row]
    return sum(float(said[i - 1][row[i]]) for i in range(begin, len(row)))


def test_likelihoods_are_those_of_the_tokens_one_after_another(
    answers: ServedAnswers, parts_of: PartsOf
) -> None:
    parts = parts_of("Qwen3Moe")
    pairs = [("The river", " froze"), ("", "over."), ("The river", " froze"), ("The river", " was")]
    found = answers.likelihoods(pairs)
    for (context, continuation), likelihood in zip(pairs, found, strict=True):
        ids = parts.tokenizer(context)["input_ids"] or [parts.tokenizer.bos_token_id]
        row = [*ids, *parts.tokenizer(continuation)["input_ids"]]
        assert likelihood.log_likelihood == pytest.approx(log_likelihood(parts, row, len(ids)), rel=1e-4)
        assert not likelihood.is_greedy
    assert found[0] == found[2]


def test_rolling_adds_up_the_windows_of_a_text(answers: ServedAnswers, parts_of: PartsOf) -> None:
    parts = parts_of("Qwen3Moe")
    text = "It is good to share. " * 8  # 168 tokens in windows of 128
    ids = [parts.tokenizer.bos_token_id, *parts.tokenizer(text)["input_ids"]]
    first = log_likelihood(parts, ids[:128], 1)
    rest = log_likelihood(parts, ids[-128:], 128 - (len(ids) - 128))
    assert answers.rolling(["Hi", text])[1] == pytest.approx(first + rest, rel=1e-4)


def test_generated_text_is_the_engines_in_the_order_of_the_prompts(parts_of: PartsOf) -> None:
    parts, told = parts_of("Qwen3Moe"), []
    answers = make_answers(parts, lambda *at: told.append(at))
    prompts = ["The river", "def add(a, b):", "What is 12 plus 30?"]
    found = answers.generate([(prompt, {"max_gen_toks": 5, "until": ["\n"]}) for prompt in prompts])
    engine = Engine(parts)
    assert found == [engine.generate(p, max_tokens=5, stop=("\n",)).text for p in prompts]
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_nothing_asked_loads_nothing() -> None:
    @contextmanager
    def refuse() -> Iterator[Any]:
        raise AssertionError("loaded for nothing")
        yield

    answers = ServedAnswers(None, None, open_harness=refuse, open_engine=refuse)  # type: ignore[arg-type]
    assert (answers.likelihoods([]), answers.rolling([]), answers.generate([])) == ([], [], [])


def test_a_chat_is_made_a_prompt_by_the_models_template(answers: ServedAnswers) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    assert answers.chat_prompt(messages, add_generation_prompt=True) == "<|user|>Hello<|end|><|begin|>"


def test_settings_of_tasks_are_the_engines() -> None:
    greedy = sampling_params({"until": "\n", "temperature": 0.7, "max_gen_toks": 9})
    assert (greedy.temperature, greedy.stop, greedy.max_tokens) == (0.0, ("\n",), 9)
    assert sampling_params({}).max_tokens == 256
    sampled = sampling_params({"do_sample": True, "top_p": 0.5, "until": ["", "a"]})
    assert (sampled.temperature, sampled.top_p, sampled.stop) == (1.0, 0.5, ("a",))
    with pytest.raises(RequestError, match="sets num_beams for generation"):
        sampling_params({"num_beams": 4})
