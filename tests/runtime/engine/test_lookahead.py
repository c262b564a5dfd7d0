"""preset: vismmoe. Forecasts at every layer, of prompts and images too, move experts and change no bit."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetero_runtime.beside_model import beside
from hetero_runtime.engine import Engine
from hetero_runtime.errors import CheckpointError, ConfigError
from hetero_runtime.foresight.rolling import RollingText
from hetero_runtime.lookahead.profile import PREFIX_SUFFIX, PrefixPoint, PrefixProfile, write_profiles
from hetero_runtime.plan import read_geometry
from hetero_runtime.planned import plan_for
from hetero_runtime.prediction import RouterFingerprint
from hetero_runtime.source import config_from
from hetero_scheduler.predict import Forecast
from hetero_scheduler.predict.lookahead_mlp import LookaheadMlp
from tests.runtime.engine.answers import assert_same_answer
from tests.runtime.engine.conftest import NUM_TOKENS, PROMPT, MakeAnswer, MakeCheckpoint
from tests.runtime.engine.serving import OPTIONS, PROMPTS
from tests.runtime.engine.test_exactness import about, expected_answer, interleaved, picture
from tests.runtime.engine.test_in_place import assert_close
from tests.runtime.foresight.imagined import imagine_link
from tests.runtime.foresight.predictors import write_random_lookahead

MEMORIES: dict[str, dict[str, Any]] = {
    "smallest": {"slabs": 4},
    "smallest per_layer": {"slabs": 12, "pool": "per_layer"},
    "40%": {"residency": 0.4},
    "60% per_layer": {"residency": 0.6, "pool": "per_layer"},
    "one layer pinned": {"residency": 0.4, "pinned_prefix": 1},
    "all": {"slabs": "all"},
}


def load(folder: Path, memory: dict[str, Any], *, device: str = "cpu", **sections: Any) -> Engine:
    preset = {"preset": "vismmoe", "execution": {"mode": "eager", "max_rows": 2, "max_length": 256}}
    return Engine.load(folder, device=device, memory=memory, **{**preset, **sections})


@pytest.fixture
def foreseen(checkpoint: MakeCheckpoint) -> Path:
    """A Qwen3Moe with a lookahead predictor that has learnt nothing."""
    folder = checkpoint("Qwen3Moe")
    write_random_lookahead(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "memory"),
    [("Qwen3Moe", memory) for memory in ("smallest", "smallest per_layer", "one layer pinned")]
    + [("Qwen2Moe", "smallest"), ("DeepseekV3", "40%")],
)
def test_wrong_forecasts_change_no_bit(
    name: str,
    memory: str,
    device: str,
    *,
    checkpoint: MakeCheckpoint,
    answer: MakeAnswer,
    logits: list[torch.Tensor],
) -> None:
    folder = checkpoint(name)
    write_random_lookahead(folder)
    with load(folder, MEMORIES[memory], device=device) as engine:
        completion = engine.generate(PROMPT[0].tolist(), max_tokens=NUM_TOKENS, ignore_eos=True)
        engine.check()
        stats = engine.stats()
    assert_same_answer(completion.token_ids, logits, answer(name, device), device=device)
    num_layers = read_geometry(folder).num_moe_layers
    assert stats.prefill.prediction.layers == num_layers
    assert stats.decode.prediction.layers == num_layers * (NUM_TOKENS - 1)
    assert stats.to_json()["decode"]["prediction_ms_a_layer"] > 0


@pytest.mark.parametrize(
    ("memory", "layers_a_copy"), [(memory, 1) for memory in MEMORIES] + [("40%", 0.1), ("40%", 5)]
)
def test_prefetches_on_any_link_change_no_bit(
    memory: str,
    layers_a_copy: float,
    *,
    foreseen: Path,
    answer: MakeAnswer,
    logits: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    imagine_link(monkeypatch, layers_a_copy)
    with load(foreseen, MEMORIES[memory]) as engine:
        completion = engine.generate(PROMPT[0].tolist(), max_tokens=NUM_TOKENS, ignore_eos=True)
        engine.check()
        stats = engine.stats()
    assert_same_answer(completion.token_ids, logits, answer("Qwen3Moe", "cpu"), device="cpu")
    if memory in ("40%", "one layer pinned"):
        assert stats.decode.cache.prefetches > 20
    if memory == "all":
        assert stats.prefill.cache.prefetches > 0  # empty slabs, and an order of what the prompt needs
    for cache in (stats.prefill.cache, stats.decode.cache):
        assert cache.required == cache.hits + cache.late + cache.misses


@pytest.mark.parametrize("misses", [{"handler": "hybrid"}, {"handler": "hybrid", "cpu_share": 0.5}])
def test_hybrid_too_up_to_rounding(
    misses: dict[str, Any],
    *,
    foreseen: Path,
    answer: MakeAnswer,
    logits: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    imagine_link(monkeypatch, 1)
    with load(foreseen, {"residency": 0.4}, misses=misses, cpu={"threads": 2}) as engine:
        completion = engine.generate(PROMPT[0].tolist(), max_tokens=NUM_TOKENS, ignore_eos=True)
        engine.check()
        stats = engine.stats()
    assert_close(completion.token_ids, logits, answer("Qwen3Moe", "cpu"))
    assert stats.decode.cache.prefetches > 0


@pytest.mark.parametrize("memory", ["smallest", "40%", "one layer pinned"])
def test_images_are_seen_and_change_no_bit(
    memory: str,
    *,
    checkpoint: MakeCheckpoint,
    logits: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = checkpoint("Qwen3VLMoe")
    write_random_lookahead(folder, sees=True)
    seen: list[torch.Tensor] = []
    see = RollingText.see
    monkeypatch.setattr(RollingText, "see", lambda text, visual: (seen.append(visual), see(text, visual)))
    imagine_link(monkeypatch, 0.5)
    messages = interleaved("first", picture(64, seed=1), "then", picture(96, seed=2), "compare")
    with load(folder, MEMORIES[memory], vision={"keep_ratio": 1}) as engine:
        completion = engine.generate(messages, max_tokens=NUM_TOKENS, ignore_eos=True)
        engine.check()
    assert_same_answer(completion.token_ids, logits, expected_answer(folder, messages, "cpu"), device="cpu")
    assert [each.shape for each in seen] == [(64,)]  # once for the whole text, images together


def test_what_is_seen_reaches_the_forecasts_of_that_text_alone(
    checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("Qwen3VLMoe")
    write_random_lookahead(folder, sees=True)
    said: list[np.ndarray] = []
    forecast = LookaheadMlp.forecast

    def hearing(self: LookaheadMlp) -> Forecast | None:
        found = forecast(self)
        if found is not None:
            said.append(found.probabilities)
        return found

    monkeypatch.setattr(LookaheadMlp, "forecast", hearing)

    def first(engine: Engine, messages: Any) -> np.ndarray:
        said.clear()
        engine.generate(messages, max_tokens=2, ignore_eos=True)
        return said[-1]

    with load(folder, {"slabs": "all"}, vision={"keep_ratio": 1}) as engine:
        blind = first(engine, about("what?"))
        one, other = (first(engine, about("what?", picture(seed=seed))) for seed in (1, 2))
        assert np.array_equal(first(engine, about("what?")), blind)  # the place has forgotten the image
        assert np.array_equal(first(engine, about("what?", picture(seed=1))), one)
    assert not np.array_equal(one, other)


def test_texts_that_take_turns_say_what_they_say_alone(
    foreseen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    max_rows = 3
    with load(foreseen, {"slabs": "all"}) as engine:
        alone = [engine.generate(prompt, **OPTIONS).token_ids for prompt in PROMPTS[:max_rows]]
    imagine_link(monkeypatch, 0.5)
    execution = {"max_rows": max_rows, "max_length": 256}
    with load(foreseen, {"residency": 0.3}, execution=execution) as engine:
        for _ in range(2):  # places are taken again
            streams = [engine.stream(prompt, **OPTIONS) for prompt in PROMPTS[:max_rows]]
            steps = [[delta.token_id for delta in step] for step in zip(*streams, strict=True)]
            assert list(zip(*steps, strict=True)) == alone
        engine.check()


def test_a_text_given_up_leaves_a_sound_engine(foreseen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imagine_link(monkeypatch, 0.5)
    with load(foreseen, {"residency": 0.3}) as engine:
        alone = engine.generate(PROMPTS[0], **OPTIONS).token_ids
        for _ in range(3):
            stream = engine.stream(PROMPTS[1], **OPTIONS)
            next(stream), next(stream)
            stream.close()
            engine.generate(PROMPTS[2], timeout_s=0.0, **OPTIONS)
        engine.check()
        assert engine.generate(PROMPTS[0], **OPTIONS).token_ids == alone


@pytest.mark.parametrize("layers_a_copy", [0.2, 3])
def test_with_fewer_image_tokens_it_says_what_lru_says_with_them(
    layers_a_copy: float,
    *,
    checkpoint: MakeCheckpoint,
    logits: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, messages = checkpoint("Qwen3VLMoe"), about("compare", picture(64, seed=1), picture(128, seed=2))
    write_random_lookahead(folder, sees=True)
    memory = {"residency": 0.4, "pinned_prefix": 1}
    options = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    with load(folder, memory, preset="lru", vision={"keep_ratio": 0.5}) as engine:
        expected = engine.generate(messages, **options).token_ids
        kept = engine.stats().compression.kept_tokens
    theirs = torch.stack(logits)
    logits.clear()
    seen: list[torch.Tensor] = []
    see = RollingText.see
    monkeypatch.setattr(RollingText, "see", lambda text, visual: (seen.append(visual), see(text, visual)))
    imagine_link(monkeypatch, layers_a_copy)
    with load(folder, memory) as engine:
        assert engine.config.vision.keep_ratio == 0.5
        assert engine.generate(messages, **options).token_ids == expected
        engine.check()
        assert engine.stats().compression.kept_tokens == kept
    assert torch.equal(torch.stack(logits), theirs)
    assert len(seen) == 2 and not torch.equal(*seen)  # of all tokens, then of those that went on


# ---- the prefix


def planned(folder: Path, **sections: Any) -> tuple[int, int]:
    """Pinned prefix and slabs of `preset: vismmoe`."""
    config = plan_for(config_from(folder, {"preset": "vismmoe", "device": "cpu", **sections})).config
    return config.memory.pinned_prefix, config.memory.slabs


@pytest.fixture
def own(checkpoint: MakeCheckpoint, tmp_path: Path) -> Path:
    """A copy whose neighbours no other test sees: 3 layers of 16 experts, top-4."""
    return Path(shutil.copytree(checkpoint("Qwen3Moe"), tmp_path / "model"))


def test_auto_takes_the_prefix_out_of_the_slabs(own: Path) -> None:
    write_random_lookahead(own)
    assert planned(own, memory={"slabs": 44}) == (1, 28)  # 24 experts are kept for what moves
    assert planned(own, memory={"slabs": 39}) == (0, 39)  # not even one layer beside them
    assert planned(own, memory={"slabs": 44, "pinned_prefix": 0}) == (0, 44)
    assert planned(own, memory={"slabs": 44, "pool": "per_layer"}) == (1, 28)
    assert planned(own, memory={"slabs": "all"}) == (1, 32)
    pinned, slabs = planned(own)
    assert (pinned, slabs) == (1, 32)  # all fit


def test_no_shallower_than_what_the_predictor_needs(own: Path) -> None:
    write_random_lookahead(own, semantic_depth=2)
    assert planned(own, memory={"slabs": 44}) == (0, 44)
    assert planned(own, memory={"slabs": "all"})[0] == 0
    assert planned(own, prediction={"predictor": "frequency"}, memory={"slabs": 44}) == (0, 44)


def test_a_profile_on_this_device_decides(own: Path) -> None:
    write_random_lookahead(own)
    fingerprint = RouterFingerprint.of_model(read_geometry(own))

    def profile(device: str, best: int) -> PrefixProfile:
        points = [PrefixPoint(pinned, 10, 1.0 + (pinned != best), 0.5, 0.5, 0.9) for pinned in range(3)]
        return PrefixProfile(device, 44, tuple(points))

    path = beside(own, PREFIX_SUFFIX)
    write_profiles(path, [profile("cuda", 0), profile("cpu", 2)], fingerprint=fingerprint)
    assert planned(own, memory={"slabs": 44})[0] == 1  # the deepest that fits
    stale = replace(fingerprint, config_sha256="00" * 32)
    write_profiles(path, [profile("cpu", 1)], fingerprint=stale)
    with pytest.raises(CheckpointError, match=r"prefix\.json: was made for another model.*profile anew"):
        planned(own)
    path.write_text("{}")
    with pytest.raises(CheckpointError, match=r"is no profile of prefixes"):
        planned(own)


# ---- which predictor


def test_without_a_predictor_the_error_says_how_to_make_one(own: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.lookahead\.safetensors does not exist; make it with"):
        planned(own)


def test_another_models_predictor_is_refused(own: Path, checkpoint: MakeCheckpoint) -> None:
    other = write_random_lookahead(checkpoint("DeepseekV3"))
    with pytest.raises(CheckpointError, match="made for another model"):
        planned(own, prediction={"path": str(other)})


def test_the_captured_step_takes_it_with_its_own_schedule_and_any_misses(own: Path) -> None:
    write_random_lookahead(own)
    graph = {"mode": "graph"}
    with pytest.raises(ConfigError, match=r"execution\.mode: graph prefetch\.schedule: edf needs all of"):
        planned(own, execution=graph, prefetch={"schedule": "edf", "extra": 12})
    for eviction, handler in (("lookahead", "load"), ("lru", "load"), ("lookahead", "hybrid")):
        with pytest.raises(
            ConfigError, match=r"execution\.mode: graph needs a CUDA device"
        ):  # and nothing else
            planned(own, execution=graph, eviction={"policy": eviction}, misses={"handler": handler})


def test_it_needs_somebody_who_listens(own: Path) -> None:
    write_random_lookahead(own)
    sections = {"prefetch": {"schedule": "none", "extra": 0}, "eviction": {"policy": "lru"}}
    with pytest.raises(ConfigError, match=r"prediction\.predictor: lookahead_mlp forecasts, and neither"):
        planned(own, **sections)


def test_its_weights_are_planned_for(own: Path) -> None:
    path = write_random_lookahead(own)
    rows = plan_for(config_from(own, {"preset": "vismmoe", "device": "cpu"})).memory.rows
    (row,) = [row for row in rows if row.name == "lookahead predictor"]
    assert row.peak == pytest.approx(2 * path.stat().st_size, rel=0.1)  # float32 of what is kept as float16


def test_half_of_the_image_tokens_where_they_can_be_dropped(
    checkpoint: MakeCheckpoint, foreseen: Path
) -> None:
    folder = checkpoint("Qwen3VLMoe")
    write_random_lookahead(folder)

    def kept(folder: Path, **sections: Any) -> float:
        sections = {"preset": "vismmoe", "device": "cpu", "memory": {"slabs": 44}, **sections}
        return plan_for(config_from(folder, sections)).config.vision.keep_ratio

    assert kept(folder) == 0.5
    assert kept(folder, memory={"slabs": 39}) == 1  # no layer is pinned
    assert kept(folder, prediction={"predictor": "frequency"}) == 1
    assert kept(folder, vision={"keep_ratio": 0.7}) == 0.7
    assert kept(folder, preset="lru", vision={"keep_ratio": "auto"}) == 0.5
    assert kept(folder, preset="lru", vision={"keep_ratio": "auto", "method": "random", "seed": 3}) == 0.5
    assert kept(foreseen) == 1  # reads text alone
    with pytest.raises(
        ConfigError, match=r"vision\.salient_ratio: 0\.6 is more than vision\.keep_ratio: 0\.5"
    ):
        kept(folder, vision={"keep_ratio": "auto", "salient_ratio": 0.6})
