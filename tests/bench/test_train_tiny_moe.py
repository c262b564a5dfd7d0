"""The bundled model's training on a CPU: split, chat form, sampling, a few steps, saving."""

from __future__ import annotations

import hashlib
import lzma
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeForCausalLM

from bench.models import chat
from bench.models.corpus import SEPARATOR, is_held_out, read_sources
from bench.models.evaluate import evaluate
from bench.models.fast_forward import install_fast_forward
from bench.models.mixture import KIND_WEIGHTS, Sampler, source_shares
from bench.models.model import Geometry, build_model, router_balance, training_loss
from bench.models.streams import Stream, load_streams
from bench.models.tokenizer import SPECIAL_TOKENS, wrap_tokenizer
from bench.models.train_tiny_moe import Run, fit, learning_rate

TINY = Geometry(
    vocab_size=384,
    hidden=32,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=16,
    experts=8,
    top_k=2,
    intermediate=8,
    max_length=128,
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of two kinds whose documents differ by a number."""
    folder = tmp_path_factory.mktemp("corpus")
    dialogues = [f"User: Which is larger, {n} or 3?\nAssistant: {max(n, 3)} is larger." for n in range(400)]
    stories = [f"Title: The cat and the Bell\n\nOnce upon a time a cat had {n} bells." for n in range(400)]
    for name, documents in (("dialog.made", dialogues), ("story.made", stories)):
        text = f"\n{SEPARATOR}\n".join(documents)
        (folder / f"P.{name}.txt.xz").write_bytes(lzma.compress(text.encode()))
    return folder


def stream(label: str, documents: list[list[int]]) -> Stream:
    """A training stream of documents given as token ids above 0."""
    tokens = np.array([token for document in documents for token in [*document, 0]], dtype=np.uint16)
    return Stream(label=label, is_held_out=False, tokens=tokens)


def test_held_out_is_decided_by_the_first_byte_of_the_text() -> None:
    documents = [f"document {n}" for n in range(4000)]
    held = [text for text in documents if is_held_out(text)]
    assert held == [text for text in documents if hashlib.sha1(text.encode()).hexdigest()[:2] < "04"]
    assert 0.008 < len(held) / len(documents) < 0.025


def test_no_document_is_in_both_splits(corpus: Path, tmp_path: Path) -> None:
    tokenizer, streams = load_streams(corpus, tmp_path, TINY.vocab_size)
    texts: dict[bool, set[str]] = {True: set(), False: set()}
    for part in streams:
        for start, end in zip(part.starts, np.flatnonzero(part.tokens == 0), strict=True):
            texts[part.is_held_out].add(tokenizer.decode(part.tokens[start:end].tolist()))
    assert texts[True]
    assert not texts[True] & texts[False]
    assert {part.label for part in streams} == {"chat.made", "dialog.made", "story.made"}


def test_an_unknown_kind_is_named(tmp_path: Path) -> None:
    (tmp_path / "P.recipe.cakes.txt.xz").write_bytes(lzma.compress(b"flour"))
    with pytest.raises(ValueError, match="kind 'recipe' is not one of"):
        read_sources(tmp_path)


@pytest.mark.parametrize(
    ("kind", "document", "expected"),
    [
        (
            "dialog",
            "User: Hi.\nAssistant: Hello.\nUser: Bye.\nAssistant: Goodbye.",
            [[("Hi.", "Hello."), ("Bye.", "Goodbye.")]],
        ),
        (
            "dialog",
            "User: Hi.\nAssistant: Yes.\n\nUser: Hi.\nAssistant: No.",
            [[("Hi.", "Yes.")], [("Hi.", "No.")]],
        ),
        ("dialog", "User: Show it.\nAssistant: |", []),
        (
            "math",
            "Question: 2 and 3?\nAnswer: 5.\n\nQuestion: 1 and 1?\nAnswer: 2.",
            [[("2 and 3?", "5."), ("1 and 1?", "2.")]],
        ),
        (
            "math",
            "Solve for x: 2*x + 1 = 5\nSubtract: 2*x = 4\nDivide: x = 2",
            [[("Solve for x: 2*x + 1 = 5", "Subtract: 2*x = 4\nDivide: x = 2")]],
        ),
        (
            "math",
            "Write a Python function called f.\n\ndef f():\n    pass",
            [[("Write a Python function called f.", "def f():\n    pass")]],
        ),
        (
            "encyc",
            "cat (noun): an animal.\n\nQuestion: Define dog.\nAnswer: An animal.",
            [[("Define dog.", "An animal.")]],
        ),
        ("encyc", "cat (noun): an animal.", []),
        (
            "story",
            "Title: The cat and the Bell\n\nA cat slept.",
            [[("Tell me a story about the cat and the Bell.", "A cat slept.")]],
        ),
        ("code", "print(1)", []),
    ],
)
def test_documents_become_conversations(kind: str, document: str, expected: list[list[chat.Turn]]) -> None:
    assert list(chat.conversations(kind, document)) == expected


def test_story_is_also_asked_about() -> None:
    told, asked = chat.conversations("story", "A cat slept.\n\nQuestion: Who slept?\nAnswer: A cat.")
    assert told[0][1] == "A cat slept."
    assert told[1:] == [("Who slept?", "A cat.")]
    assert asked == [("A cat slept.\n\nWho slept?", "A cat.")]


def test_sums_are_asked_and_answered() -> None:
    (turns,) = chat.conversations("math", "2 + 3 = 5\n8 / 4 = 2")
    assert [answer for _, answer in turns] == ["2 + 3 = 5", "8 / 4 = 2"]
    assert all(sum_ in question for (question, _), sum_ in zip(turns, ("2 + 3", "8 / 4"), strict=True))


def test_shares_add_up_by_kind() -> None:
    streams = [stream("story.a", [[1] * 9]), stream("story.b", [[1] * 29]), stream("code.c", [[1] * 4])]
    shares = source_shares(streams)
    story = KIND_WEIGHTS["story"] / (KIND_WEIGHTS["story"] + KIND_WEIGHTS["code"])
    assert shares == pytest.approx([story / 4, story * 3 / 4, 1 - story])


def test_windows_stay_in_their_source_and_often_begin_a_document() -> None:
    short, long = [[7, 8, 9]] * 40, [list(range(1000, 1900))]
    sampler = Sampler([stream("story.short", short), stream("code.long", long)], length=8, device=CPU, seed=0)
    windows = sampler.draw(2000)
    is_long = windows[:, 0] >= 1000
    assert windows.shape == (2000, 9)
    assert torch.equal(windows[is_long][:, 1:8], windows[is_long][:, :1] + torch.arange(1, 8))
    assert (windows[~is_long] < 10).all()
    assert (windows[~is_long][:, 0] == 7).float().mean() > 0.5
    assert (windows[is_long][:, 0] == 1000).float().mean() < 0.05


def test_sampler_refuses_windows_longer_than_every_source() -> None:
    with pytest.raises(ValueError, match="no source has more than 65 tokens"):
        Sampler([stream("story.a", [[1] * 9])], length=64, device=CPU, seed=0)


def test_learning_rate_rises_holds_and_ends_at_zero() -> None:
    rates = [learning_rate(done, 1.0) for done in (0.0, 0.03, 0.39, 0.7, 1.0)]
    assert rates == pytest.approx([0.05, 1.0, 1.0, 0.5, 0.0])


def test_balance_is_taken_layer_by_layer() -> None:
    even = torch.zeros(1, 4, 4) + 9 * torch.eye(4)
    one_expert = torch.zeros(1, 4, 4) + 9 * torch.eye(4)[:1]
    other_expert = torch.zeros(1, 4, 4) + 9 * torch.eye(4)[1:2]
    assert router_balance(even, 1) == pytest.approx(1.0, abs=1e-3)
    assert router_balance(torch.cat([one_expert, other_expert]), 1) > 3.9


@pytest.mark.parametrize("seed", [0, 1])
def test_fast_forward_gives_the_same_loss_and_gradients(seed: int) -> None:
    torch.manual_seed(seed)
    model = build_model(TINY, CPU)
    windows = torch.randint(5, TINY.vocab_size, (3, 33))
    results = []
    for install in (False, True):
        if install:
            install_fast_forward(model)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss, _ = training_loss(model, windows)
        loss.backward()
        results.append((loss.item(), {name: weight.grad for name, weight in model.named_parameters()}))
    (plain, plain_gradients), (fast, fast_gradients) = results
    assert fast == pytest.approx(plain, rel=1e-3)
    for name, gradient in plain_gradients.items():
        fast_gradient = fast_gradients[name]
        assert gradient is not None
        assert fast_gradient is not None
        assert (fast_gradient - gradient).norm() <= 0.03 * gradient.norm(), name


def test_a_few_steps_lower_the_loss_and_the_folder_loads(corpus: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    raw, streams = load_streams(corpus, tmp_path / "tokens", TINY.vocab_size)
    tokenizer, model = wrap_tokenizer(raw, TINY.max_length), build_model(TINY, CPU)
    before = evaluate(model, streams, length=32)
    run = Run(minutes=0.05, batch=8, length=32, peak_rate=1e-2)
    progress = fit(model, tokenizer, streams, run=run, out=tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert isinstance(loaded, Qwen3MoeForCausalLM)
    after = evaluate(loaded, streams, length=32)
    assert progress.tokens == progress.steps * 8 * 32
    assert after.mean_loss < before.mean_loss - 0.5
    assert set(after.loss) == {"chat", "dialog", "story"}
    assert all(0 < entropy <= 1 for entropy in after.load_entropy)
    again = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert again.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2, 3, 4]
    assert loaded.generation_config.eos_token_id == [0, 4]


def test_template_renders_what_training_saw(corpus: Path, tmp_path: Path) -> None:
    raw, _ = load_streams(corpus, tmp_path, TINY.vocab_size)
    tokenizer = wrap_tokenizer(raw, TINY.max_length)
    messages = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == chat.render([("Hi.", "Hello.")])
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|user|>Hi.<|end|><|assistant|>"
    system = [{"role": "system", "content": "Be kind."}, messages[0]]
    assert tokenizer.apply_chat_template(system, tokenize=False) == "<|user|>Be kind.\n\nHi.<|end|>"
