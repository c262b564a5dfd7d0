"""Calibration of the lookahead predictor: what is read, what is gathered of it, and both commands."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner, Result

from hetero_runtime import assembly
from hetero_runtime.assembly import Parts, assemble
from hetero_runtime.beside_model import beside
from hetero_runtime.cli.calibrate import app
from hetero_runtime.config import load_config
from hetero_runtime.engine import Engine
from hetero_runtime.errors import ConfigError, RequestError
from hetero_runtime.experts.base import ExpertStore
from hetero_runtime.lookahead import LOOKAHEAD_SUFFIX, read_lookahead_description
from hetero_runtime.lookahead.gather import GatherOptions, gather
from hetero_runtime.lookahead.lessons import Lesson, encode_lessons, prompt_of, read_lessons
from hetero_runtime.lookahead.prefix import ProfileOptions, profile_prefixes
from hetero_runtime.lookahead.profile import PREFIX_SUFFIX
from hetero_runtime.orchestrator import Phase
from hetero_runtime.planned import plan_for
from hetero_runtime.prompt import PromptReader
from hetero_runtime.source import config_from
from hetero_runtime.tiers import opening
from hetero_scheduler import ExpertKey
from hetero_scheduler.predict.lookahead_features import Passes, faded
from tests.architectures import build_checkpoint, image_inputs, prompt_ids, reference_model
from tests.runtime.foresight.predictors import write_random_lookahead

FOX = "the quick brown fox jumps over the lazy dog"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint("Qwen3VLMoe", tmp_path_factory.mktemp("lookahead") / "model")


@pytest.fixture
def parts(folder: Path) -> Any:
    made = assemble(plan_for(config_from(folder, {"device": "cpu", "memory": {"residency": 0.4}})).config)
    yield made
    made.close()


# ---- lessons


def test_texts_and_conversations_are_read(tmp_path: Path) -> None:
    file = tmp_path / "lessons.jsonl"
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    file.write_text(json.dumps({"text": FOX}) + "\n\n" + json.dumps({"messages": messages}) + "\n")
    assert read_lessons(file) == [FOX, messages]
    assert prompt_of(messages) == messages[:1]
    assert prompt_of(messages[:1]) == messages[:1]
    plain = tmp_path / "plain.txt"
    plain.write_text("one\n\ntwo")
    assert read_lessons(plain) == ["one", "two"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"line 1: is no JSON"),
        ('{"text": "a"}\n{"text": 3}', r"line 2: give \{"),
        ('{"messages": ["hi"]}', r"line 1: give \{"),
        ("[1]", r"line 1: give \{"),
        ("\n", "is empty"),
    ],
)
def test_lines_that_are_no_lesson_are_named(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "lessons.jsonl"
    file.write_text(content)
    with pytest.raises(RequestError, match=message):
        read_lessons(file)


def test_lessons_as_ids(parts: Parts) -> None:
    reader = PromptReader(
        parts.config.model.path,
        tokenizer=parts.tokenizer,
        config=parts.model.config,
        has_images=True,
        max_length=256,
    )
    image = {"type": "image", "image": Image.new("RGB", (64, 64))}
    asked = {"role": "user", "content": [image, {"type": "text", "text": "what?"}]}
    sources: list[Any] = [FOX, "x", [asked], [asked, {"role": "assistant", "content": FOX}]]
    text, open_ended, answered = encode_lessons(sources, reader, parts.tokenizer, length=10)
    whole = tuple(parts.tokenizer(FOX)["input_ids"])[:10]
    assert text.prompt_ids + (text.answer_ids or ()) == whole
    assert len(text.prompt_ids) == len(whole) // 2 and text.images is None
    assert open_ended.answer_ids is None and open_ended.images is not None
    assert answered.prompt_ids == open_ended.prompt_ids
    assert answered.answer_ids == tuple(parts.tokenizer(FOX, add_special_tokens=False)["input_ids"])


# ---- what is gathered


def heard_by_transformers(folder: Path, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Router inputs and choices of plain transformers, `[tokens, L, H]` and `[tokens, L, K]`."""
    model, hidden, chosen = reference_model(folder), [], []
    for layer in model.model.language_model.layers:
        layer.mlp.gate.register_forward_hook(lambda _m, given, said: hidden.append(given[0].flatten(0, -2)))
        layer.mlp.experts.register_forward_pre_hook(lambda _m, given: chosen.append(given[1]))
    with torch.no_grad():
        model(**inputs)
    return torch.stack(hidden, 1), torch.stack(chosen, 1)


def check_tokens(gathered: Passes, first: int, hidden: torch.Tensor, chosen: torch.Tensor) -> None:
    """Passes from `first` on are these tokens, one after the other."""
    for number, (its_hidden, its_chosen) in enumerate(zip(hidden, chosen, strict=True), first):
        assert gathered.num_tokens[number] == 1
        np.testing.assert_allclose(gathered.hidden[number], its_hidden.numpy(), atol=2e-3)
        for layer, experts in enumerate(its_chosen.tolist()):
            assert np.flatnonzero(gathered.share[number, layer]).tolist() == sorted(experts)
        before = faded(
            gathered.history[number - 1].astype(np.float32), gathered.share[number - 1].astype(np.float32)
        )
        np.testing.assert_allclose(gathered.history[number], before, atol=2e-3)


def test_passes_are_what_transformers_routes(parts: Parts, folder: Path) -> None:
    ids = prompt_ids(24)
    hidden, chosen = heard_by_transformers(
        folder, {"input_ids": ids, "position_ids": torch.arange(24).expand(3, 1, -1)}
    )
    lesson = Lesson(tuple(ids[0, :14].tolist()), None, tuple(ids[0, 14:].tolist()))
    gathered = gather(parts, [lesson], options=GatherOptions(tokens=8))
    assert gathered.num_tokens.tolist() == [14] + [1] * (4 + 8)  # the prompt, its end, what follows
    np.testing.assert_allclose(gathered.hidden[0], hidden[:14].mean(0).numpy(), atol=2e-3)
    assert gathered.share[0].astype(np.float32).sum(axis=1) == pytest.approx([4.0] * 3, abs=1e-2)
    assert not gathered.history[0].any()
    assert gathered.visual.shape == (1, 0)
    check_tokens(gathered, 1, hidden[10:14], chosen[10:14])
    check_tokens(gathered, 5, hidden[14:22], chosen[14:22])


def test_images_are_summed_up_and_only_what_comes_after_them_is_single(parts: Parts, folder: Path) -> None:
    inputs = image_inputs(num_images=2)
    model = reference_model(folder)
    embeddings: list[torch.Tensor] = []
    model.model.language_model.register_forward_pre_hook(
        lambda _m, _given, named: embeddings.append(named["inputs_embeds"][0]), with_kwargs=True
    )
    with torch.no_grad():
        model(**inputs)
    ids = inputs["input_ids"][0]
    images = {name: inputs[name] for name in ("pixel_values", "image_grid_thw", "mm_token_type_ids")}
    lessons = [
        Lesson(tuple(ids.tolist()), images, (70, 71, 72)),
        Lesson(tuple(prompt_ids(6)[0].tolist()), None, (70,)),
    ]
    gathered = gather(parts, lessons, options=GatherOptions(tokens=40))
    summary = embeddings[0][ids == model.config.image_token_id].mean(0)
    np.testing.assert_allclose(gathered.visual[0], summary.numpy(), rtol=2e-3, atol=2e-3)
    assert not gathered.visual[1].any()
    assert gathered.document.tolist() == [0] * (1 + 5 + 3) + [1] * (1 + 6 + 1)  # 5 follow the last image


def test_what_has_no_answer_goes_on_by_itself(parts: Parts) -> None:
    lesson = Lesson(tuple(prompt_ids(6)[0].tolist()), None, None)
    options = GatherOptions(tokens=4, max_new=5)
    one, other = (gather(parts, [lesson], options=options) for _ in range(2))
    assert one.num_tokens.tolist() == [6] + [1] * (2 + 5)
    np.testing.assert_array_equal(one.share, other.share)
    with pytest.raises(RequestError, match="nothing to learn from"):
        gather(parts, [], options=options)


# ---- the commands


def test_what_follows_a_prompt_that_was_cut_is_as_when_it_is_written(folder: Path) -> None:
    """Layers hold different numbers of tokens then; a known answer is read as the model itself writes it."""
    words = {"device": "cpu", "memory": {"slabs": "all", "pinned_prefix": 1}, "vision": {"keep_ratio": 0.5}}
    made = assemble(plan_for(config_from(folder, words)).config)
    inputs = image_inputs()
    images = {name: part for name, part in inputs.items() if name not in ("input_ids", "attention_mask")}
    ids = tuple(inputs["input_ids"][0].tolist())
    options = GatherOptions(tokens=4, max_new=3, temperature=0.0)
    try:
        written = gather(made, [Lesson(ids, images, None)], options=options)
        with made.sequences.open() as sequence, made.orchestrator.pass_(Phase.PREFILL, checkpoint=list):
            answer = [int(sequence.extend(torch.tensor(ids), images).argmax())]
            for _ in range(2):
                answer.append(int(sequence.extend(torch.tensor(answer[-1:])).argmax()))
        read = gather(made, [Lesson(ids, images, tuple(answer))], options=options)
    finally:
        made.close()
    assert len(read) == len(written)
    np.testing.assert_array_equal(read.share, written.share)
    np.testing.assert_array_equal(read.hidden, written.hidden)


def run(*words: str) -> tuple[Result, dict[str, Any]]:
    done = CliRunner().invoke(app, [*words, "--json", "--set", "device=cpu"])
    assert done.exit_code == 0, done.output
    return done, json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture
def lessons(tmp_path: Path) -> Path:
    """Texts, and a few questions about pictures."""
    rng, rows = np.random.default_rng(0), []
    for i in range(12):
        words = rng.permutation(FOX.split()).tolist()
        rows.append({"text": " ".join(words)})
        if i % 2:
            picture = tmp_path / f"{i}.png"
            Image.fromarray(rng.integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(picture)
            content = [{"type": "image", "image": str(picture)}, {"type": "text", "text": words[0]}]
            asked = {"role": "user", "content": content}
            rows.append({"messages": [asked, {"role": "assistant", "content": words[1]}]})
    file = tmp_path / "lessons.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def test_the_predictor_is_found_beside_its_model(folder: Path, tmp_path: Path, lessons: Path) -> None:
    own = Path(shutil.copytree(folder, tmp_path / "model"))
    words = ("lookahead", str(own), "--text", str(lessons), "--epochs", "3", "--width", "8")
    done, report = run(*words, "--tokens", "8", "--compare")
    path = beside(own, LOOKAHEAD_SUFFIX)
    assert report["out"] == str(path) and report["file_bytes"] == path.stat().st_size
    assert report["has_images"] and report["num_documents"] == {"train": 14, "validation": 2, "test": 2}
    assert report["counts"] == [2, 3, 4] and report["most"] == [0.5, 0.75, 1.0]
    names = ["lookahead", "without the visual feature", "frequency", "history", "random"]
    for kind in ("tokens", "prompts"):
        found = {(each["predictor"], each["distance"]): each["at"] for each in report[kind]}
        assert list(dict.fromkeys(name for name, _ in found)) == names
        assert all(0 <= share <= 1 for at in found.values() for share in at)
        assert found["random", 0] == [2 / 16, 3 / 16, 4 / 16]
    assert "hot recall, single tokens" in done.stderr
    notes = read_lookahead_description(path).notes
    assert notes["tokens"] == report["tokens"] and notes["training"]["width"] == 8
    with Engine.load(own, device="cpu", preset="vismmoe", memory={"slabs": 44}) as engine:
        assert engine.config.memory.pinned_prefix == report["semantic_depth"] == 1
        engine.generate("the", max_tokens=4, ignore_eos=True)
        assert engine.stats().decode.prediction.layers == 9


def test_too_few_texts_are_refused_and_nothing_is_written(folder: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "one.txt", tmp_path / "out.safetensors"
    file.write_text(FOX)
    words = ["lookahead", str(folder), "--text", str(file), "--out", str(out), "--set", "device=cpu"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code != 0
    assert "give more texts" in done.stderr
    assert not out.exists()


def test_prefixes_are_measured_in_the_same_room_with_experts_read_once(
    folder: Path, tmp_path: Path, lessons: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = list[ExpertStore]()

    def open_store(*arguments: Any, **options: Any) -> ExpertStore:
        stores.append(opening.open_store(*arguments, **options))
        return stores[-1]

    monkeypatch.setattr(assembly, "open_store", open_store)
    own = Path(shutil.copytree(folder, tmp_path / "model"))
    write_random_lookahead(own)
    picture = tmp_path / "curve.png"
    words = ("prefix", str(own), "--text", str(lessons), "--prompts", "2", "--max-tokens", "3")
    done, profile = run(*words, "--plot", str(picture), "--set", "memory.slabs=44")
    assert [(point["pinned"], point["slabs"]) for point in profile["points"]] == [(0, 44), (1, 28)]
    (store,) = stores
    with pytest.raises(AssertionError, match="the bank is closed"):
        store.record(ExpertKey(0, 0))
    assert profile["num_experts"] == 44 and profile["device"] == "cpu"
    assert min(point["seconds"] for point in profile["points"]) > 0
    assert "(fastest)" in done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    path = beside(own, PREFIX_SUFFIX)
    assert profile["written_to"] == str(path)
    run(*words, "--prefixes", "1", "--set", "memory.slabs=44")  # takes the place of the first
    run(*words, "--prefixes", "0", "--set", "memory.slabs=all")
    kept = json.loads(path.read_text())["profiles"]
    assert [(each["num_experts"], len(each["points"])) for each in kept] == [(44, 1), (48, 1)]
    sections = {"preset": "vismmoe", "device": "cpu", "memory": {"slabs": 44}}
    assert plan_for(config_from(own, sections)).config.memory.pinned_prefix == 1


def test_a_prefix_that_does_not_fit_is_refused(folder: Path) -> None:
    write_random_lookahead(folder)
    config = load_config(
        {"preset": "vismmoe", "model": {"path": str(folder)}, "device": "cpu", "memory": {"slabs": 44}}
    )
    with pytest.raises(ConfigError, match=r"--prefixes 2: does not fit.*room for 44 experts; write 0 to 1"):
        profile_prefixes(config, ["the"], options=ProfileOptions(prefixes=(2,)))
    with pytest.raises(RequestError, match="no prompt to profile with"):
        profile_prefixes(config, [], options=ProfileOptions())
