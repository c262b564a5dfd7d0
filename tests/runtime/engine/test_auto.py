"""`preset: auto` loads what short runs found best, with the experts read once."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_runtime import assembly
from hetero_runtime.bundled import model_path
from hetero_runtime.config import ResolvedConfig, load_config
from hetero_runtime.engine import Engine
from hetero_runtime.errors import ConfigError
from hetero_runtime.tuning import find_candidates, measure
from hetero_runtime.tuning.base import Candidate, Measured
from hetero_runtime.tuning.choose import choose
from hetero_runtime.tuning.measure import EngineMeasurer
from tests.runtime.engine.conftest import MakeCheckpoint
from tests.runtime.engine.rest import assert_at_rest
from tests.runtime.engine.serving import OPTIONS, PROMPTS, Alone
from tests.runtime.steps_on_cpu import steps_on_cpu

SETTINGS: dict[str, Any] = {
    "preset": "auto",
    "device": "cpu",
    "memory": {"residency": 0.3},
    "execution": {"max_rows": 1, "max_length": 256},
}


def candidates(folder: Path, **sections: Any) -> list[Candidate]:
    tree = {**SETTINGS, "model": {"path": str(folder)}, **sections}
    return find_candidates(lambda beneath: load_config(tree, beneath=beneath))


def preferring(name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """From now on the candidate called so is the fastest, by a real run of each; gives their names."""
    measure, ran = EngineMeasurer.measure, list[str]()

    def say(measurer: EngineMeasurer, candidate: Candidate) -> Measured:
        measured = measure(measurer, candidate)
        ran.append(candidate.name)
        return measured._replace(ms_per_token=1.0 if candidate.name == name else 10.0)

    monkeypatch.setattr(EngineMeasurer, "measure", say)
    monkeypatch.setattr("hetero_runtime.tuning.settled.choose", partial(choose, seconds=1e9))
    return ran


@pytest.mark.parametrize(
    ("name", "key"), [("lru", "lru"), ("lfru", "lfru"), ("misses on the CPU", "lru")], ids=str
)
def test_the_best_is_loaded_with_experts_read_once(
    name: str,
    key: str,
    *,
    checkpoint: MakeCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    banks: Any,
    alone: Alone,
) -> None:
    ran, before = preferring(name, monkeypatch), banks.num_made
    with (
        caplog.at_level(logging.INFO, logger="hetero_runtime.tuning"),
        Engine.load(checkpoint("Qwen3Moe"), **SETTINGS) as engine,
    ):
        made = banks.num_made - before
        assert engine.config.eviction.policy == key
        assert engine.config.misses.handler == ("cpu" if "CPU" in name else "load")
        assert engine.generate(PROMPTS[0], **OPTIONS).token_ids == alone(PROMPTS[0]).token_ids
        assert_at_rest(engine)
    assert ran == ["lru", "lfru", "misses split", "misses on the CPU"]
    assert made == 1
    assert f"* {name}: 1.0 ms a token" in caplog.text
    assert "seqmoe: not possible: prediction.predictor: mamba2 needs a predictor" in caplog.text


def test_a_candidate_that_turns_out_impossible_takes_no_other_with_it(
    checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch, banks: Any
) -> None:
    """Though it held the experts when that came out."""
    ran, before = preferring("misses on the CPU", monkeypatch), banks.num_made
    is_possible = assembly.make_in_place

    def make_in_place(config: ResolvedConfig, *arguments: Any, **options: Any) -> Any:
        if config.misses.handler == "hybrid":
            raise ConfigError("this model's experts cannot be split")
        return is_possible(config, *arguments, **options)

    monkeypatch.setattr(assembly, "make_in_place", make_in_place)
    with Engine.load(checkpoint("Qwen3Moe"), **SETTINGS) as engine:
        made = banks.num_made - before
        assert engine.config.misses.handler == "cpu"
    assert ran == ["lru", "lfru", "misses on the CPU"]
    assert made == 2  # they are read anew


def test_what_is_given_is_not_measured(
    checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ran = preferring("lru", monkeypatch)
    given = {
        "misses": {"handler": "load"},
        "eviction": {"policy": "lfru"},
        "prefetch": {"schedule": "none"},
    }
    with (
        caplog.at_level(logging.INFO, logger="hetero_runtime.tuning"),
        Engine.load(checkpoint("Qwen3Moe"), **SETTINGS, **given) as engine,
    ):
        assert engine.config.eviction.policy == "lfru"
    assert not ran
    assert len(caplog.records) == 1
    assert "what is given leaves nothing to choose" in caplog.text


def test_a_runs_divergence_is_none_where_routing_is_exact_and_some_where_it_is_not() -> None:
    memory = {"residency": 0.25, "pool": "per_layer"}
    exact, *steered = candidates(model_path(), memory=memory, routing={"kl_budget": 1.0})[:4]
    measurer = EngineMeasurer([exact, *steered])
    try:
        assert measurer.measure(exact).kl == 0
        found = [measurer.measure(candidate) for candidate in steered]
    finally:
        measurer.close()
    assert all(0 < measured.kl < 1 and measured.kl_error > 0 for measured in found)
    assert found[0].kl < found[2].kl  # a larger bonus deviates more


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter stands in where there is no GPU")
def test_captured_steps_are_tried_like_any_other(
    checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In rows too short for the text that all are to read; and what trying them counted on the device is not
    the engine's."""
    steps_on_cpu(monkeypatch)
    monkeypatch.setattr(measure, "NUM_WARM", 1)
    monkeypatch.setattr(measure, "NUM_TIMED", 2)
    ran = preferring("lfru", monkeypatch)
    execution = {"mode": "graph", "max_rows": 1, "max_length": len(PROMPTS[0]) + 3}
    given = {"misses": {"handler": "load"}, "prefetch": {"schedule": "popularity"}}
    with Engine.load(checkpoint("Qwen3Moe"), **{**SETTINGS, "execution": execution}, **given) as engine:
        assert ran == ["lru", "lfru"]
        assert engine.config.eviction.policy == "lfru"
        assert engine.stats().mode == "graph"
        assert engine.stats().decode.cache.required == 0
        engine.generate(PROMPTS[0], max_tokens=3, ignore_eos=True)
        assert engine.stats().decode.cache.required == 2 * 3 * 4  # steps, layers, top-k
        engine.check()


def test_a_model_that_does_not_fit_is_told_as_ever(checkpoint: MakeCheckpoint, banks: Any) -> None:
    with pytest.raises(ConfigError, match=r"pinned_prefix=99"):
        Engine.load(checkpoint("Qwen3Moe"), **{**SETTINGS, "memory": {"pinned_prefix": 99}})
    assert banks.num_made == 0
