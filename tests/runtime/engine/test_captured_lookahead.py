"""preset: vismmoe in graph mode, without a GPU: the tokens of eager mode, whatever is foreseen."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_runtime.engine import Engine
from hetero_runtime.foresight.rolling import RollingText
from hetero_runtime.orchestrator import captured_lookahead, captured_prefetch
from hetero_runtime.orchestrator.captured_lookahead import CapturedLookahead
from hetero_runtime.orchestrator.device import DeviceOrchestrator
from hetero_runtime.stepping import graph as graph_stepping
from hetero_scheduler import trials
from hetero_scheduler.trials import Trials
from tests.architectures import prompt_ids
from tests.runtime.engine.conftest import MakeCheckpoint
from tests.runtime.engine.test_exactness import about, interleaved, picture
from tests.runtime.foresight.predictors import write_random_lookahead
from tests.runtime.steps_on_cpu import steps_on_cpu

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter stands in where there is no GPU"
)

TEXT = prompt_ids(5)[0].tolist()
OPTIONS: dict[str, Any] = {"max_tokens": 3, "ignore_eos": True}


@pytest.fixture(autouse=True)
def _fetches_what_is_unlikely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictors that have learnt nothing are sure of nothing."""
    monkeypatch.setattr(captured_lookahead, "LIKELY", 0.0)


@pytest.fixture
def looks_ahead_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few steps are decoded here; the first ones with forecasts."""
    monkeypatch.setattr(captured_prefetch, "Trials", lambda choices: Trials(choices[::-1]))


def load(folder: Path, mode: str, rows: int, **sections: Any) -> Engine:
    words: dict[str, Any] = {
        "preset": "vismmoe",
        "memory": {"slabs": 20, "pinned_prefix": 1},
        "execution": {"mode": mode, "max_rows": rows, "max_length": 128},
    }
    return Engine.load(folder, device="cpu", **{**words, **sections})


def in_turns(engine: Engine, prompts: list[Any]) -> list[tuple[int, ...]]:
    streams = [engine.stream(prompt, **OPTIONS) for prompt in prompts]
    steps = [[delta.token_id for delta in step] for step in zip(*streams, strict=True)]
    return list(zip(*steps, strict=True))


def assert_sound(engine: Engine) -> None:
    assert isinstance(engine._parts.orchestrator, DeviceOrchestrator)
    engine.check()
    stats = engine.stats()
    decode = stats.decode.cache
    assert decode.prefetches > 0
    assert decode.required == decode.hits + decode.late + decode.misses
    assert stats.prefill.prediction.layers > 0


@pytest.mark.usefixtures("looks_ahead_first")
def test_rows_with_images_say_what_they_say_alone_in_eager_mode(
    checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two rows step together, one of them with fewer image tokens; then another prompt takes a place."""
    folder = checkpoint("Qwen3VLMoe")
    write_random_lookahead(folder, sees=True)
    prompts = [
        about("compare", picture(64, seed=1), picture(128, seed=2)),
        TEXT,
        interleaved("first", picture(64, seed=3), "then", picture(64, seed=4), "which?"),
    ]
    with load(folder, "eager", rows=1) as engine:
        expected = [engine.generate(prompt, **OPTIONS).token_ids for prompt in prompts]
        kept = engine.stats().compression.kept_tokens
    seen: list[torch.Tensor] = []
    see = RollingText.see
    monkeypatch.setattr(RollingText, "see", lambda text, visual: (seen.append(visual), see(text, visual)))
    steps_on_cpu(monkeypatch)
    with caplog.at_level(logging.WARNING), load(folder, "graph", rows=2) as engine:
        assert "stays eager" not in caplog.text
        assert in_turns(engine, prompts[:2]) == expected[:2]
        assert engine.generate(prompts[2], **OPTIONS).token_ids == expected[2]
        assert_sound(engine)
        assert engine.stats().compression.kept_tokens == kept
    assert len(seen) == 4  # of each prompt with images: all tokens, then those that went on


@pytest.mark.usefixtures("looks_ahead_first")
@pytest.mark.parametrize("eviction", ["lookahead", pytest.param("lru", marks=pytest.mark.slow)])
def test_prompts_one_after_another(
    eviction: str, *, checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("Qwen3Moe")
    write_random_lookahead(folder)
    prompts = [TEXT, prompt_ids(9, seed=1)[0].tolist(), TEXT]
    with load(folder, "eager", rows=1) as engine:
        expected = [engine.generate(prompt, **OPTIONS).token_ids for prompt in prompts]
    steps_on_cpu(monkeypatch)
    with load(folder, "graph", rows=1, eviction={"policy": eviction}) as engine:
        assert [engine.generate(prompt, **OPTIONS).token_ids for prompt in prompts] == expected
        assert_sound(engine)
        orchestrator: Any = engine._parts.orchestrator
        asker = orchestrator._prefetch._asker
        assert isinstance(asker, CapturedLookahead)
        assert (asker._scores is not None) == (eviction == "lookahead")


@pytest.mark.parametrize("handler", ["load", "hybrid"])
def test_steps_with_and_without_forecasts_are_tried_in_turn_and_say_the_same(
    handler: str,
    *,
    checkpoint: MakeCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Within one text the way changes, more than once; then it is found that forecasts do not pay."""
    folder = checkpoint("Qwen3Moe")
    write_random_lookahead(folder)
    options = OPTIONS | {"max_tokens": 13}
    with load(folder, "eager", rows=1) as engine:
        expected = engine.generate(TEXT, **options).token_ids
    for name, steps in (("SETTLE_STEPS", 1), ("BLOCK_STEPS", 2)):
        monkeypatch.setattr(trials, name, steps)
    monkeypatch.setattr(graph_stepping, "MOST_STEPS", 1)
    steps_on_cpu(monkeypatch)
    sections: dict[str, Any] = {}
    if handler == "hybrid":
        sections = {"misses": {"handler": "hybrid", "cpu_share": 0.5}, "cpu": {"backend": "torch"}}
    with load(folder, "graph", rows=1, **sections) as engine:
        orchestrator = engine._parts.orchestrator
        ways: list[int] = []
        monkeypatch.setattr(orchestrator, "observe_steps", slow_with_forecasts(orchestrator, ways))
        assert engine.generate(TEXT, **options).token_ids == expected
        assert ways[0] == 0 and sorted({*ways}) == [0, 1]
        assert_sound(engine)
        assert orchestrator.is_settled
        assert [record.message for record in caplog.records if "without forecasts" in record.message] == [
            "tokens are decoded without forecasts from now on: a step takes 1000.00 ms so, and 2000.00 ms "
            "with them; prompts keep theirs"
        ]
        assert engine.generate(TEXT, **options).token_ids == expected
        assert orchestrator.way == 0
        if handler == "hybrid":
            assert engine.stats().decode.in_place.experts > 0
        engine.check()


def slow_with_forecasts(orchestrator: Any, ways: list[int]) -> Callable[[int, float], None]:
    """What hears of steps, but with times that were made up. `ways`: grows by the way of each."""
    observe_steps = orchestrator.observe_steps

    def observe(num_steps: int, _seconds: float) -> None:
        ways.append(orchestrator.way)
        observe_steps(num_steps, num_steps * (1.0 + orchestrator.way))

    return observe
