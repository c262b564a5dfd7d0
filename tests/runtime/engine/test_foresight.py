"""Forecasts move experts and change no bit: every schedule, residency and pool, one text or several."""

from __future__ import annotations

import io
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from hetero_gpu import SlabCache
from hetero_runtime.cli.summary import summary_table
from hetero_runtime.config import load_config
from hetero_runtime.config.tree import Horizon
from hetero_runtime.engine import Engine
from hetero_runtime.errors import CheckpointError, ConfigError
from hetero_runtime.expert_file.pack import pack
from hetero_runtime.foresight.build import followed_in_graph, refined_in_graph
from hetero_runtime.plan import read_geometry
from hetero_runtime.planned import decide
from hetero_runtime.prediction import read_predictor
from hetero_runtime.prediction.horizons import predictors_of
from hetero_scheduler.prefetch import SCHEDULES
from tests.runtime.engine.answers import assert_same_answer
from tests.runtime.engine.conftest import NUM_TOKENS, PROMPT, MakeAnswer, MakeCheckpoint
from tests.runtime.engine.serving import OPTIONS, PROMPTS
from tests.runtime.foresight.imagined import imagine_link
from tests.runtime.foresight.predictors import write_random_predictor

Memory = dict[str, Any]


def memories(folder: Path) -> dict[str, Memory]:
    """The smallest pools that are legal, shared or one a layer, and larger ones."""
    geometry = read_geometry(folder)
    least = geometry.top_k
    return {
        "smallest": {"slabs": least},
        "smallest per_layer": {"slabs": least * geometry.num_moe_layers, "pool": "per_layer"},
        "40%": {"residency": 0.4},
        "60% per_layer": {"residency": 0.6, "pool": "per_layer"},
        "all": {"slabs": "all"},
    }


MEMORIES = ("smallest", "smallest per_layer", "40%", "60% per_layer", "all")


@pytest.fixture
def foreseen(checkpoint: MakeCheckpoint) -> Path:
    """A Qwen3Moe with a predictor beside it."""
    return with_predictor(checkpoint("Qwen3Moe"))


def with_predictor(folder: Path) -> Path:
    write_random_predictor(folder)
    return folder


def load(folder: Path, device: str, memory: Memory, **sections: Any) -> Engine:
    preset = {"preset": "seqmoe", "execution": {"mode": "eager", "max_rows": 2, "max_length": 256}}
    return Engine.load(folder, device=device, memory=memory, **{**preset, **sections})


@pytest.mark.parametrize("memory", ["smallest", "smallest per_layer", "40%"])
@pytest.mark.parametrize("name", ["Qwen3Moe", "Qwen2Moe", "DeepseekV3", "GptOss"])
def test_seqmoe_answers_as_transformers_does(
    name: str,
    memory: str,
    device: str,
    *,
    checkpoint: MakeCheckpoint,
    answer: MakeAnswer,
    logits: list[torch.Tensor],
) -> None:
    folder = with_predictor(checkpoint(name))
    with load(folder, device, memories(folder)[memory]) as engine:
        completion = engine.generate(PROMPT[0].tolist(), max_tokens=NUM_TOKENS, ignore_eos=True)
        engine.check()
        cache = engine.stats().decode.cache
    assert cache.prefetches == 0 or device == "cuda"  # on the CPU a copy overlaps with nothing
    assert_same_answer(completion.token_ids, logits, answer(name, device), device=device)


@pytest.mark.parametrize(
    ("schedule", "memory", "layers_a_copy"),
    [("jsd", memory, 1) for memory in MEMORIES]
    + [(schedule, "40%", copy) for schedule in SCHEDULES for copy in (0.2, 3)],
)
def test_prefetches_on_any_link_change_no_bit(
    schedule: str,
    memory: str,
    layers_a_copy: float,
    *,
    foreseen: Path,
    answer: MakeAnswer,
    logits: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    imagine_link(monkeypatch, layers_a_copy)
    with load(foreseen, "cpu", memories(foreseen)[memory], prefetch={"schedule": schedule}) as engine:
        completion = engine.generate(PROMPT[0].tolist(), max_tokens=NUM_TOKENS, ignore_eos=True)
        engine.check()
        cache = engine.stats().decode.cache
    assert_same_answer(completion.token_ids, logits, answer("Qwen3Moe", "cpu"), device="cpu")
    if memory in ("40%", "60% per_layer"):
        assert cache.prefetches > 20
    assert cache.required == cache.hits + cache.late + cache.misses
    assert 0 <= cache.hits_prefetched <= cache.hits
    assert 0 <= engine.stats().prefetches_open == engine._parts.cache.stats().prefetches_open


def test_every_prefetch_of_a_prompt_comes_to_an_end_in_the_table(
    foreseen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever phase it was made in, and whichever it was used or wasted in."""
    imagine_link(monkeypatch, 0.02)
    with load(foreseen, "cpu", {"residency": 0.8}) as engine:
        completion = engine.generate(PROMPT[0].tolist(), max_tokens=NUM_TOKENS, ignore_eos=True)
        stats = engine.stats()
        written = io.StringIO()
        Console(file=written, width=120).print(summary_table(stats, completion.timings))

    def numbers(label: str) -> list[int]:
        line = next(line for line in written.getvalue().splitlines() if line.startswith(label))
        return [int(number) for number in re.findall(r"\d+", line.removeprefix(label))]

    made, ends = numbers("prefetches"), numbers("of all: used, late, wasted")
    assert sum(ends[:3]) < made[0], "decode came upon nothing that the prompt had fetched"
    assert sum(ends) + sum(numbers("of all: not required so far")) == sum(made)


@pytest.mark.parametrize("horizon", ["token", "layer"])
def test_nearer_horizons_change_no_token(
    horizon: str,
    *,
    checkpoint: MakeCheckpoint,
    answer: MakeAnswer,
    logits: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    imagine_link(monkeypatch, 1)
    folder = checkpoint("Qwen3Moe")
    write_random_predictor(folder, is_refined=True)
    with load(folder, "cpu", {"residency": 0.4}, prediction={"horizon": horizon}) as engine:
        completion = engine.generate(PROMPT[0].tolist(), max_tokens=NUM_TOKENS, ignore_eos=True)
        engine.check()
        assert engine.stats().decode.cache.prefetches > 20
    assert_same_answer(completion.token_ids, logits, answer("Qwen3Moe", "cpu"), device="cpu")


def test_auto_looks_nearer_only_where_it_leads_to_transfers(
    checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    folder = checkpoint("Qwen3Moe")
    write_random_predictor(folder, is_refined=True)
    config = load_config({"preset": "seqmoe", "model": {"path": str(folder)}, "device": "cpu"})
    assert decide(config).config.prediction.horizon == "step"
    file = tmp_path / "experts.safetensors"
    pack(decide(config).config, file)
    on_disk = replace(config, memory=replace(config.memory, backing="direct", expert_file=str(file)))
    assert decide(on_disk).config.prediction.horizon == "layer"
    write_random_predictor(folder)
    assert decide(on_disk).config.prediction.horizon == "step"
    asked = replace(config, prediction=replace(config.prediction, horizon="token"))
    with pytest.raises(ConfigError, match=r"horizon: token is not what .* has learned, which is step"):
        decide(asked)


@pytest.mark.parametrize(("horizon", "asks_early"), [("step", None), ("token", False), ("layer", True)])
def test_a_captured_step_is_told_how_near_to_look(
    checkpoint: MakeCheckpoint, horizon: Horizon, asks_early: bool | None
) -> None:
    """It goes on from the Mamba2 predictors, and refines them itself."""
    folder = checkpoint("Qwen3Moe")
    path = write_random_predictor(folder, is_refined=True)
    settings = {"preset": "seqmoe", "model": {"path": str(folder)}, "prediction": {"horizon": horizon}}
    eager = decide(load_config(settings | {"device": "cpu"})).config
    captured = replace(eager, execution=replace(eager.execution, mode="graph"))
    predictors = predictors_of(read_predictor(path), 2, nearest=horizon)
    assert len(followed_in_graph(captured, predictors)) == 2
    assert followed_in_graph(eager, predictors) == []
    refined = refined_in_graph(captured, predictors)
    assert refined_in_graph(eager, predictors) is None
    assert (None if refined is None else refined.asks_early) == asks_early


@pytest.mark.parametrize(
    "settings", [{}, {"eviction": {"policy": "lru"}}, {"prefetch": {"schedule": "none"}}]
)
def test_a_predictor_that_only_counts_serves_too(
    settings: dict[str, Any],
    *,
    checkpoint: MakeCheckpoint,
    answer: MakeAnswer,
    logits: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    imagine_link(monkeypatch, 1)
    sections = {"prediction": {"predictor": "frequency"}, **settings}
    with load(checkpoint("Qwen3Moe"), "cpu", {"residency": 0.4}, **sections) as engine:
        completion = engine.generate(PROMPT[0].tolist(), max_tokens=NUM_TOKENS, ignore_eos=True)
        engine.check()
    assert_same_answer(completion.token_ids, logits, answer("Qwen3Moe", "cpu"), device="cpu")


@pytest.mark.parametrize("max_rows", [1, 2, 4])
def test_texts_that_take_turns_say_what_they_say_alone(
    max_rows: int, foreseen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(foreseen, "cpu", {"slabs": "all"}) as engine:
        alone = [engine.generate(prompt, **OPTIONS).token_ids for prompt in PROMPTS[:max_rows]]
    imagine_link(monkeypatch, 0.5)
    execution = {"max_rows": max_rows, "max_length": 256}
    with load(foreseen, "cpu", {"residency": 0.3}, execution=execution) as engine:
        for _ in range(2):  # places are taken again
            streams = [engine.stream(prompt, **OPTIONS) for prompt in PROMPTS[:max_rows]]
            steps = [[delta.token_id for delta in step] for step in zip(*streams, strict=True)]
            assert list(zip(*steps, strict=True)) == alone
        engine.check()
        assert engine.stats().decode.cache.prefetches > 0


def test_a_text_given_up_leaves_a_sound_engine(foreseen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imagine_link(monkeypatch, 0.5)
    with load(foreseen, "cpu", {"residency": 0.3}) as engine:
        alone = engine.generate(PROMPTS[0], **OPTIONS).token_ids
        for _ in range(3):
            stream = engine.stream(PROMPTS[1], **OPTIONS)
            next(stream), next(stream)
            stream.close()
            engine.generate(PROMPTS[2], timeout_s=0.0, **OPTIONS)
        engine.check()
        assert engine.generate(PROMPTS[0], **OPTIONS).token_ids == alone


def test_a_prefetch_that_fails_ends_one_request_alone(
    foreseen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copier = imagine_link(monkeypatch, 0.5)
    submit, prefetch = copier.submit, SlabCache.prefetch

    def failing(*_: Any, **__: Any) -> Any:
        raise OSError("the link is down")

    def prefetch_over_a_broken_link(self: SlabCache, *arguments: Any, **options: Any) -> bool:
        copier.submit = failing  # type: ignore[method-assign]
        try:
            return prefetch(self, *arguments, **options)
        finally:
            copier.submit = submit  # type: ignore[method-assign]

    with load(foreseen, "cpu", {"residency": 0.3}) as engine:
        alone = engine.generate(PROMPTS[0], **OPTIONS).token_ids
        with monkeypatch.context() as broken:
            broken.setattr(SlabCache, "prefetch", prefetch_over_a_broken_link)
            with pytest.raises(OSError, match="the link is down"):
                engine.generate(PROMPTS[1], **OPTIONS)
        engine.check()
        assert engine.generate(PROMPTS[0], **OPTIONS).token_ids == alone


def test_more_threads_than_places(foreseen: Path) -> None:
    with load(foreseen, "cpu", {"residency": 0.3}) as engine:
        alone = [engine.generate(prompt, **OPTIONS).token_ids for prompt in PROMPTS]
        with ThreadPoolExecutor(len(PROMPTS)) as threads:
            asked = [threads.submit(engine.generate, prompt, **OPTIONS) for prompt in PROMPTS]
        assert [one.result().token_ids for one in asked] == alone
        engine.check()
        assert engine.stats().active_rows == 0


# ---- which predictor


def test_without_a_predictor_the_error_says_where_it_was_looked_for(checkpoint: MakeCheckpoint) -> None:
    folder = checkpoint("Olmoe")
    with pytest.raises(
        ConfigError, match=rf"{folder.name}\.predictor\.safetensors does not exist.*frequency"
    ):
        load(folder, "cpu", {"residency": 0.4})


def test_a_predictor_of_another_model_is_refused_before_weights_are_read(
    foreseen: Path, checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = write_random_predictor(checkpoint("DeepseekV3"))
    monkeypatch.setattr("hetero_runtime.engine.assemble", lambda *_, **__: pytest.fail("weights are read"))
    with pytest.raises(CheckpointError, match="made for another model"):
        load(foreseen, "cpu", {"residency": 0.4}, prediction={"path": str(stale)})


def test_routers_that_cannot_be_heard_are_refused(checkpoint: MakeCheckpoint) -> None:
    with pytest.raises(CheckpointError, match=r"by token id .* learned router"):
        load(checkpoint("DeepseekV4"), "cpu", {"residency": 0.4}, prediction={"predictor": "frequency"})


def test_the_resolved_configuration_names_the_file(foreseen: Path) -> None:
    with load(foreseen, "cpu", {"residency": 0.4}) as engine:
        assert engine.config.prediction.path == str(write_random_predictor(foreseen))
