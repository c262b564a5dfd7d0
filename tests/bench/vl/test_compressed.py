"""Many questions in one pass, fewer tokens behind a prefix: the same as the engine, prompt by prompt."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from bench.visual_routing import RoutingListener
from bench.vl.comparison import Reader, compare, load_reader
from bench.vl.compressed import CompressedForward, count_experts
from bench.vl.forward import BatchForward
from bench.vl.held_out import MEASURED, MODEL, Asked, HeldOut, ask_rows
from bench.vl.pool import NO_KIND
from bench.vl.questions import KINDS, Question
from bench.vl.text import NO_TARGET, PAD_SEGMENT, prefix_ids
from hetero_runtime import Engine
from hetero_scheduler.compression import METHODS, make_selector

PINNED = 2


@pytest.fixture(scope="module")
def reader() -> Reader:
    return load_reader(MODEL, "cpu")


@pytest.fixture(scope="module")
def held_out(reader: Reader) -> HeldOut:
    return ask_rows(3, reader.tokenizer)


def test_rows_have_all_measured_kinds_and_no_question_twice(reader: Reader, held_out: HeldOut) -> None:
    kinds = held_out.kinds[held_out.kinds != NO_KIND]
    assert {KINDS[kind] for kind in kinds.tolist()} == set(MEASURED)
    for row, own in zip(held_out.rows, held_out.kinds, strict=True):
        segments = range(1, 1 + int((own != NO_KIND).sum()))
        texts = [reader.tokenizer.decode(row[0, row[1] == segment].tolist()) for segment in segments]
        assert len(set(texts)) == len(texts) > 4
        assert set(row[1].tolist()) == {*segments, PAD_SEGMENT}
    again = ask_rows(2, reader.tokenizer)
    assert all(torch.equal(one[:2], other) for one, other in zip(held_out, again, strict=True))


@torch.no_grad()
def test_all_tokens_kept_is_the_plain_forward(reader: Reader, held_out: HeldOut) -> None:
    prefix = prefix_ids(reader.tokenizer)
    plain, cut = BatchForward(reader.model, prefix), CompressedForward(reader.model, prefix, pinned=PINNED)
    wanted = reader.model.lm_head(plain(held_out.pictures, held_out.rows).hidden)
    half = cut.begin(held_out.pictures, held_out.rows)
    for selector in (None, make_selector("affinity", keep_ratio=1.0)):
        assert torch.equal(cut.finish(half, selector).logits, wanted)
    plain.close()
    cut.close()


@pytest.mark.parametrize("method", METHODS)
def test_experts_and_answers_are_the_engines(method: str, reader: Reader, held_out: HeldOut) -> None:
    cut = CompressedForward(reader.model, prefix_ids(reader.tokenizer), pinned=PINNED)
    selector = make_selector(method, keep_ratio=0.5)
    answered = cut.finish(cut.begin(held_out.pictures, held_out.rows), selector)
    cut.close()
    activated = count_experts(answered, held_out.rows, num_experts=64)
    with Engine.load(
        MODEL,
        device="cpu",
        model={"dtype": "float32"},
        memory={"slabs": "all", "pinned_prefix": PINNED},
        execution={"max_rows": 1},
        vision={"keep_ratio": 0.5, "method": method},
    ) as engine:
        asked = [question_of(reader, *each) for each in zip(held_out.pictures, held_out.rows, strict=True)]
        texts = [engine.generate(each.messages, max_tokens=1, temperature=0.0).text for each in asked]
        listener = RoutingListener(engine)
        layers = [listener.read(each.image, each.question.text)[PINNED:] for each in asked]
    firsts = [first_token(*each) for each in zip(held_out.rows, answered.logits, strict=True)]
    assert [text.strip() for text in texts] == [reader.tokenizer.decode([first]).strip() for first in firsts]
    assert {layer.is_visual.sum() for prompt in layers for layer in prompt} == {72}
    experts = [[len(np.unique(layer.chosen)) for layer in prompt] for prompt in layers]
    assert experts == activated.T.tolist()


def question_of(reader: Reader, pixels: torch.Tensor, row: torch.Tensor) -> Asked:
    """A picture with the first question of its row."""
    asked = row[0, (row[1] == 1) & (row[3] == NO_TARGET)]
    text = reader.tokenizer.decode(asked.tolist(), skip_special_tokens=True)
    return Asked(Image.fromarray(pixels.numpy()), Question(MEASURED[0], text, ""))


def first_token(row: torch.Tensor, logits: torch.Tensor) -> int:
    """What the pass answers the first question with."""
    return int(logits[int((row[3] != NO_TARGET).nonzero()[0])].argmax())


def test_a_comparison_counts_questions_and_experts(reader: Reader, held_out: HeldOut) -> None:
    ways = {"all": None, "half": make_selector("saliency", keep_ratio=0.5)}
    outcomes = compare(reader, held_out, ways, pinned=PINNED)
    for outcome in outcomes.values():
        assert sum(outcome.asked.values()) == int((held_out.kinds != NO_KIND).sum())
        assert all(0 <= outcome.right[kind] <= outcome.asked[kind] for kind in MEASURED)
        assert 4 <= outcome.experts <= 64
    assert outcomes["half"].experts < outcomes["all"].experts
    assert outcomes["all"].mean > 0.8
