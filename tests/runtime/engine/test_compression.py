"""Compressed prompts answer as transformers does with the same tokens dropped by hand, at every residency."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from hetero_runtime.engine import Engine
from hetero_runtime.errors import ConfigError
from hetero_scheduler.compression import ImageTokens, TokenSelector, make_selector
from tests import tiny_tokenizer
from tests.architectures import reference_model
from tests.runtime.engine.answers import aligned, assert_same_answer, transformers_answer
from tests.runtime.engine.conftest import NUM_TOKENS, PROMPT, MakeAnswer, MakeCheckpoint
from tests.runtime.engine.dropped_by_hand import Choose, Dropped, answer_dropping
from tests.runtime.engine.test_exactness import about, chat_inputs, load, memory_of, picture
from tests.scheduler.compression.plain import compress

ONE = about("what is this?", picture(128))
TWO = about("compare", picture(128, seed=1), picture(192, seed=2))
METHODS = ("affinity", "saliency", "random", "mix")

ByHand = Callable[..., Dropped]


def choose_by_hand(method: str) -> Choose:
    if method == "affinity":
        return lambda images: compress(images, salient=Fraction(1, 4), keep=Fraction(1, 2), weight=2.0)
    selector = make_selector(method, keep_ratio=0.5)
    return lambda images: [tokens.tolist() for tokens in selector.select(images)]


@pytest.fixture(scope="module")
def by_hand(checkpoint: MakeCheckpoint) -> ByHand:
    """`by_hand(method, prefix, device)`: the answer to TWO, half of its visual tokens dropped."""

    @cache
    def answer(method: str, prefix: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Dropped:
        folder = checkpoint("Qwen3VLMoe", dtype)
        return answer_dropping(
            aligned(reference_model(folder, dtype=dtype)).to(device),
            chat_inputs(folder, TWO),
            prefix=prefix,
            choose=choose_by_hand(method),
            num_tokens=NUM_TOKENS,
        )

    return answer


def compressed(
    make: MakeCheckpoint, device: str = "cpu", *, method: str = "affinity", prefix: int = 1, **others: Any
) -> Engine:
    folder = make("Qwen3VLMoe", others.pop("dtype", torch.float32))
    memory = {**memory_of(others.pop("residency", "25%"), folder), "pinned_prefix": prefix}
    return load(folder, device, memory=memory, vision={"keep_ratio": 0.5, "method": method}, **others)


@pytest.mark.parametrize("residency", ["smallest", "25%", "all"])
@pytest.mark.parametrize("prefix", [1, 2])
def test_affinity_at_every_residency(
    prefix: int,
    residency: str,
    device: str,
    *,
    checkpoint: MakeCheckpoint,
    by_hand: ByHand,
    logits: list[torch.Tensor],
) -> None:
    with compressed(checkpoint, device, prefix=prefix, residency=residency) as engine:
        completion = engine.generate(TWO, max_tokens=NUM_TOKENS, ignore_eos=True)
        engine.check()
        stats = engine.stats().compression
    expected = by_hand("affinity", prefix, device)
    assert_same_answer(completion.token_ids, logits, expected.answer, device=device)
    assert (stats.prompts, stats.visual_tokens, stats.kept_tokens) == (
        1,
        expected.num_visual,
        expected.num_kept,
    )
    assert expected.num_kept == expected.num_visual // 2
    assert (stats.experts_before, stats.experts_after) == (expected.experts_before, expected.experts_after)
    assert stats.seconds > 0


@pytest.mark.parametrize("method", METHODS[1:])
def test_every_other_method(
    method: str, checkpoint: MakeCheckpoint, by_hand: ByHand, logits: list[torch.Tensor]
) -> None:
    with compressed(checkpoint, method=method) as engine:
        completion = engine.generate(TWO, max_tokens=NUM_TOKENS, ignore_eos=True)
    assert_same_answer(completion.token_ids, logits, by_hand(method, 1).answer, device="cpu")


def test_methods_differ(by_hand: ByHand) -> None:
    """Otherwise the comparisons above could not tell one from the other."""
    answers = [by_hand(method, 1).answer.logits[0] for method in METHODS]
    assert not any(torch.equal(one, other) for i, one in enumerate(answers) for other in answers[:i])


def test_bfloat16(checkpoint: MakeCheckpoint, by_hand: ByHand, logits: list[torch.Tensor]) -> None:
    with compressed(checkpoint, dtype=torch.bfloat16) as engine:
        completion = engine.generate(TWO, max_tokens=NUM_TOKENS, ignore_eos=True)
    expected = by_hand("affinity", 1, "cpu", torch.bfloat16).answer
    assert_same_answer(completion.token_ids, logits, expected, device="cpu")


@pytest.mark.parametrize("keep_ratio", [1.0, 0.5], ids=["all kept", "of one token all kept"])
def test_nothing_to_drop_is_the_plain_model(
    keep_ratio: float, checkpoint: MakeCheckpoint, logits: list[torch.Tensor]
) -> None:
    folder = checkpoint("Qwen3VLMoe")
    messages = ONE if keep_ratio == 1 else about("what is this?", picture(32))
    memory = {"residency": 0.25, "pinned_prefix": 1}
    with load(folder, "cpu", memory=memory, vision={"keep_ratio": keep_ratio}) as engine:
        completion = engine.generate(messages, max_tokens=NUM_TOKENS, ignore_eos=True)
        stats = engine.stats().compression
    expected = transformers_answer(
        aligned(reference_model(folder)), chat_inputs(folder, messages), num_tokens=NUM_TOKENS
    )
    assert_same_answer(completion.token_ids, logits, expected, device="cpu")
    assert stats.kept_tokens == stats.visual_tokens == (0 if keep_ratio == 1 else 1)


def test_text_alone_is_the_plain_models(
    checkpoint: MakeCheckpoint, answer: MakeAnswer, logits: list[torch.Tensor]
) -> None:
    with compressed(checkpoint) as engine:
        completion = engine.generate(PROMPT[0].tolist(), max_tokens=NUM_TOKENS, ignore_eos=True)
        assert engine.stats().compression.prompts == 0
    assert_same_answer(completion.token_ids, logits, answer("Qwen3VLMoe", "cpu"), device="cpu")


def test_interleaved_texts_have_their_own_lengths(checkpoint: MakeCheckpoint, device: str) -> None:
    chats = [TWO, about("no picture"), ONE]
    execution = {"mode": "eager", "max_rows": 3, "max_length": 256}
    with compressed(checkpoint, device, execution=execution) as engine:
        alone = [engine.generate(chat, max_tokens=16, ignore_eos=True).token_ids for chat in chats]
        streams = [engine.stream(chat, max_tokens=16, ignore_eos=True) for chat in chats]
        steps = [[delta.token_id for delta in step] for step in zip(*streams, strict=True)]
        engine.check()
    assert list(zip(*steps, strict=True)) == alone


def test_an_image_at_the_very_end_keeps_its_last_token(checkpoint: MakeCheckpoint) -> None:
    """No chat template ends so; the logits of a prompt are those of its last token all the same."""
    folder = checkpoint("Qwen3VLMoe")
    inputs = chat_inputs(folder, ONE)
    end = int(inputs["mm_token_type_ids"][0].nonzero()[-1]) + 1
    ids = inputs["input_ids"][:, :end]
    cut_short = {**inputs, "input_ids": ids, "mm_token_type_ids": (ids == tiny_tokenizer.IMAGE).int()}
    model = aligned(reference_model(folder))
    expected = answer_dropping(model, cut_short, prefix=1, choose=lambda _images: [[0, 1]], num_tokens=1)
    with compressed(checkpoint) as engine, engine._parts.sequences.open() as sequence:
        compressor = engine._parts.compressor
        assert compressor is not None
        compressor._selector = _TheFirstTwo(1.0, 0.0)
        del cut_short["input_ids"]
        assert torch.equal(sequence.extend(ids[0], cut_short), expected.answer.logits[0])
    assert expected.num_kept == 3


class _TheFirstTwo(TokenSelector):
    def select(self, images: Sequence[ImageTokens]) -> list[npt.NDArray[np.int64]]:
        return [np.array([0, 1]) for _ in images]

    def scores(self, images: Sequence[ImageTokens], cores: Sequence[npt.NDArray[np.int64]]) -> Any:
        raise AssertionError("nobody is asked")


def test_a_prompt_that_fails_at_the_cut_leaves_nothing_behind(
    checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    with compressed(checkpoint) as engine:
        before = engine.generate(TWO, max_tokens=8, ignore_eos=True)
        compressor = engine._parts.compressor
        assert compressor is not None
        with monkeypatch.context() as patch:
            patch.setattr(compressor._selector, "select", lambda _images: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.generate(TWO, max_tokens=8)
        assert engine.stats().compression.prompts == 1
        engine.check()
        assert engine.generate(TWO, max_tokens=8, ignore_eos=True).token_ids == before.token_ids


@pytest.mark.gpu
@pytest.mark.parametrize("residency", ["25%", "all"])
def test_captured_steps_go_on_behind_the_cut(residency: str, checkpoint: MakeCheckpoint) -> None:
    """Rows lose different numbers of tokens, one of them none."""
    prompts = (ONE, TWO, PROMPT[0].tolist())
    with compressed(checkpoint, "cuda", residency=residency) as engine:
        expected = [engine.generate(prompt, max_tokens=NUM_TOKENS, ignore_eos=True) for prompt in prompts]
    execution = {"mode": "graph", "max_rows": 2, "max_length": 256}
    with (
        compressed(checkpoint, "cuda", residency=residency, execution=execution) as engine,
        ThreadPoolExecutor(len(prompts)) as pool,
    ):
        assert engine._parts.compressor is not None
        ask = partial(engine.generate, max_tokens=NUM_TOKENS, ignore_eos=True)
        for _ in range(2):
            said = list(pool.map(ask, prompts))
            assert [each.token_ids for each in said] == [each.token_ids for each in expected]
        engine.check()
        assert engine.stats().compression.prompts == 4


def test_a_model_that_sees_nothing_is_refused(checkpoint: MakeCheckpoint) -> None:
    with pytest.raises(ConfigError, match=r"vision.keep_ratio: 0.5 is for images.*reads text alone"):
        load(checkpoint("Qwen3Moe"), "cpu", memory={"pinned_prefix": 1}, vision={"keep_ratio": 0.5})


def test_a_prefix_of_all_layers_leaves_nothing_to_compress(checkpoint: MakeCheckpoint) -> None:
    with pytest.raises(ConfigError, match=r"memory.pinned_prefix pins all 3 MoE layers"):
        load(checkpoint("Qwen3VLMoe"), "cpu", memory={"pinned_prefix": "all"}, vision={"keep_ratio": 0.5})
