"""The captured decode step against the eager engine, on a GPU."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hetero_gpu.control import Word
from hetero_runtime import Engine
from hetero_runtime.generation import Request
from hetero_runtime.hf.graph_sequences import StepPlan
from hetero_runtime.orchestrator import captured_lookahead, captured_prefetch
from hetero_scheduler.trials import Trials
from tests.architectures import ARCHITECTURES, prompt_ids
from tests.gpu.sync_debug import syncs_are_errors
from tests.runtime.engine.conftest import MakeCheckpoint
from tests.runtime.engine.test_captured_foresight import AHEAD
from tests.runtime.engine.test_in_place import HANDLERS
from tests.runtime.foresight.predictors import write_random_lookahead, write_random_predictor

pytestmark = pytest.mark.gpu

PROMPT = prompt_ids(17)[0].tolist()
UNIFORMS = (None, [[0.5]] * 4)
CAPTURABLE = tuple(name for name in ARCHITECTURES if name != "DeepseekV4")


def load(folder: object, mode: str, *, rows: int = 1, **memory: object) -> Engine:
    return Engine.load(
        str(folder),
        device="cuda",
        memory=memory,
        execution={"mode": mode, "max_rows": rows, "max_length": 128},
    )


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What our own loggers said."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("hetero_runtime")]


def different_prompts(number: int) -> list[list[int]]:
    """Of different lengths too."""
    return [prompt_ids(9 + 2 * i, seed=i)[0].tolist() for i in range(number)]


def answer(engine: Engine, prompt: list[int] = PROMPT, num_tokens: int = 48) -> tuple[int, ...]:
    return engine.generate(prompt, max_tokens=num_tokens, ignore_eos=True).token_ids


def eager_answers(folder: object, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """One after another, all experts resident."""
    with load(folder, "eager", residency=1.0) as engine:
        return [answer(engine, prompt) for prompt in prompts]


def assert_said_side_by_side(engine: Engine, prompts: list[list[int]], alone: list[tuple[int, ...]]) -> None:
    """All of `prompts` at once get the answers that each gets `alone`."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(lambda prompt: answer(engine, prompt), prompts)) == alone
    engine.check()


@pytest.mark.parametrize("memory", [{"slabs": 4}, {"residency": 0.25}, {"slabs": "all"}], ids=str)
@pytest.mark.parametrize("name", CAPTURABLE)
def test_tokens_equal_the_eager_engines(
    checkpoint: MakeCheckpoint, name: str, memory: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    folder = checkpoint(name)
    with load(folder, "eager", **memory) as engine:
        expected = answer(engine)
    with caplog.at_level(logging.WARNING), load(folder, "graph", **memory) as engine:
        assert not said(caplog)
        assert answer(engine) == expected
        assert answer(engine) == expected  # the second prompt takes the same place, warm
        engine.check()
        stats = engine.stats()
        assert stats.decode.cache.required == stats.decode.cache.hits + stats.decode.cache.misses
        assert stats.decode.tokens == 2 * 47


@pytest.mark.parametrize("misses", HANDLERS)
@pytest.mark.parametrize("rows", [1, 3])
def test_misses_computed_on_the_cpu_in_the_captured_step_change_no_token(
    checkpoint: MakeCheckpoint, misses: str, rows: int, caplog: pytest.LogCaptureFixture
) -> None:
    folder, prompts = checkpoint("Qwen3Moe"), different_prompts(3)
    alone = eager_answers(folder, prompts)
    with (
        caplog.at_level(logging.WARNING),
        Engine.load(
            str(folder),
            device="cuda",
            memory={"residency": 0.8},
            misses=HANDLERS[misses],
            execution={"mode": "graph", "max_rows": rows, "max_length": 128},
        ) as engine,
    ):
        assert not [text for text in said(caplog) if "stays eager" in text]
        with ThreadPoolExecutor(rows) as pool:
            assert list(pool.map(lambda prompt: answer(engine, prompt), prompts)) == alone
        engine.check()
        decode = engine.stats().decode
    assert decode.cache.misses == decode.cache.loads + decode.in_place.experts
    assert decode.in_place.experts > 0 or misses == "hybrid"  # that one may find loading faster


@pytest.mark.parametrize("eviction", ["lru", "lfu", "lfru"])
def test_every_required_expert_is_counted(checkpoint: MakeCheckpoint, eviction: str) -> None:
    """The same routing requires the same experts, wherever it runs."""
    counts = []
    for mode in ("eager", "graph"):
        with Engine.load(
            str(checkpoint("Qwen3Moe")),
            device="cuda",
            memory={"residency": 0.5},
            eviction={"policy": eviction},
            prefetch={"schedule": "none"},
            execution={"mode": mode, "max_rows": 1, "max_length": 128},
        ) as engine:
            answer(engine)
            counts.append(engine.stats().decode.cache.required)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("name", ["Qwen3Moe", "Qwen3Next", "DeepseekV3", "GptOss"])
@pytest.mark.parametrize("rows", [2, 3, 4])
def test_rows_that_step_together_do_not_disturb_each_other(
    checkpoint: MakeCheckpoint, name: str, rows: int, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = different_prompts(6)
    folder = checkpoint(name)
    alone = eager_answers(folder, prompts)
    with caplog.at_level(logging.WARNING), load(folder, "graph", rows=rows, residency=0.8) as engine:
        assert not said(caplog)
        assert_said_side_by_side(engine, prompts, alone)
        decode = engine.stats().decode
        assert decode.tokens == 6 * 47
        assert decode.passes < decode.tokens, "no step had more than one row"


@pytest.mark.parametrize("name", ["Qwen3Moe", "DeepseekV3", "GptOss"])
@pytest.mark.parametrize("rows", [1, 3])
def test_drafts_are_checked_in_one_captured_step(
    checkpoint: MakeCheckpoint, name: str, rows: int, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = [3 * prompt for prompt in different_prompts(4)]
    folder = checkpoint(name)
    alone = eager_answers(folder, prompts)
    with (
        caplog.at_level(logging.WARNING),
        Engine.load(
            str(folder),
            device="cuda",
            memory={"slabs": "all"},
            execution={"mode": "graph", "max_rows": rows, "max_length": 128},
            speculation={"drafter": "prompt_lookup", "k": 7},
        ) as engine,
    ):
        assert not said(caplog)
        assert_said_side_by_side(engine, prompts, alone)
        assert engine.stats().drafts.accepted > 0


def test_a_seeded_request_says_the_same_alone_and_among_others(checkpoint: MakeCheckpoint) -> None:
    options: dict[str, Any] = {
        "temperature": 0.9,
        "top_k": 20,
        "seed": 3,
        "max_tokens": 40,
        "ignore_eos": True,
    }
    with load(checkpoint("Qwen3Moe"), "graph", rows=2, slabs="all") as engine:
        alone = engine.generate(PROMPT, **options).token_ids
        assert engine.generate(PROMPT, **options).token_ids == alone
        with ThreadPoolExecutor(2) as pool:
            other = pool.submit(answer, engine)
            assert engine.generate(PROMPT, **options).token_ids == alone
            other.result()


def load_prefetching(folder: object, *, rows: int = 1, **memory: object) -> Engine:
    return Engine.load(
        str(folder),
        device="cuda",
        memory=memory,
        prediction={"predictor": "pregate"},
        prefetch={"schedule": "top_b"},
        execution={"mode": "graph", "max_rows": rows, "max_length": 128},
    )


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["Qwen3Moe", "DeepseekV3", "GptOss"])
def test_prefetching_changes_no_token(
    checkpoint: MakeCheckpoint, name: str, rows: int, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = different_prompts(4)
    folder = checkpoint(name)
    alone = eager_answers(folder, prompts)
    with caplog.at_level(logging.WARNING), load_prefetching(folder, rows=rows, residency=0.8) as engine:
        assert not said(caplog)
        assert_said_side_by_side(engine, prompts, alone)
        cache = engine.stats().decode.cache
        assert cache.prefetches > 0
        assert cache.required == cache.hits + cache.late + cache.misses


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("horizon", ["step", "token", "layer"])
def test_foresight_changes_no_token(
    checkpoint: MakeCheckpoint, horizon: str, rows: int, caplog: pytest.LogCaptureFixture
) -> None:
    """However near it looks; what has come of prefetches is known when all is said."""
    prompts = different_prompts(4)
    folder = checkpoint("Qwen3Moe")
    write_random_predictor(folder, is_refined=True)
    alone = eager_answers(folder, prompts)
    with (
        caplog.at_level(logging.WARNING),
        Engine.load(
            str(folder),
            preset="seqmoe",
            device="cuda",
            memory={"residency": 0.8},
            prediction={"horizon": horizon},
            execution={"mode": "graph", "max_rows": rows, "max_length": 128},
        ) as engine,
    ):
        assert not said(caplog)
        assert_said_side_by_side(engine, prompts, alone)
        cache = engine.stats().decode.cache
        assert cache.prefetches > 0
        assert cache.required == cache.hits + cache.late + cache.misses
        assert cache.hits_prefetched <= cache.hits
        assert cache.hits_prefetched + cache.prefetches_wasted <= cache.prefetches


@pytest.mark.parametrize("misses", HANDLERS)
@pytest.mark.parametrize("ahead", AHEAD)
def test_misses_computed_on_the_cpu_beside_prefetches_change_no_token(
    checkpoint: MakeCheckpoint, ahead: str, misses: str, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = different_prompts(4)
    folder = checkpoint("Qwen3Moe")
    write_random_predictor(folder)
    alone = eager_answers(folder, prompts)
    with (
        caplog.at_level(logging.WARNING),
        Engine.load(
            str(folder),
            device="cuda",
            memory={"residency": 0.8},
            misses=HANDLERS[misses],
            execution={"mode": "graph", "max_rows": 3, "max_length": 128},
            **AHEAD[ahead],
        ) as engine,
    ):
        assert not [text for text in said(caplog) if "stays eager" in text]
        assert_said_side_by_side(engine, prompts, alone)
        decode = engine.stats().decode
    assert decode.cache.prefetches > 0
    assert decode.cache.required == decode.cache.hits + decode.cache.late + decode.cache.misses
    assert decode.in_place.experts > 0 or misses == "hybrid"  # that one may find loading faster


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("eviction", ["lookahead", "lru"])
def test_looking_ahead_within_the_step_changes_no_token(
    eviction: str,
    rows: int,
    *,
    checkpoint: MakeCheckpoint,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(captured_lookahead, "LIKELY", 0.0)  # the predictor has learnt nothing
    monkeypatch.setattr(
        captured_prefetch, "Trials", lambda choices: Trials(choices[::-1])
    )  # and speaks first
    prompts = different_prompts(4)
    folder = checkpoint("Qwen3Moe")
    write_random_lookahead(folder)
    alone = eager_answers(folder, prompts)
    with (
        caplog.at_level(logging.WARNING),
        Engine.load(
            str(folder),
            preset="vismmoe",
            device="cuda",
            memory={"residency": 0.8},
            eviction={"policy": eviction},
            execution={"mode": "graph", "max_rows": rows, "max_length": 128},
        ) as engine,
    ):
        assert not said(caplog)
        assert_said_side_by_side(engine, prompts, alone)
        stats = engine.stats()
        assert stats.prefill.prediction.layers > 0
        assert stats.decode.cache.prefetches > 0
        assert stats.decode.cache.required == (
            stats.decode.cache.hits + stats.decode.cache.late + stats.decode.cache.misses
        )


def test_a_dead_worker_is_told_of_once_and_done_without(checkpoint: MakeCheckpoint) -> None:
    with load_prefetching(checkpoint("Qwen3Moe"), residency=0.5) as engine:
        expected = answer(engine)
        orchestrator: Any = engine._parts.orchestrator
        orchestrator._prefetch._worker._region.write(Word.STOP, 1)
        orchestrator._prefetch._worker._thread.join()
        with pytest.raises(RuntimeError, match="the prefetch worker ended"):
            answer(engine)
        assert answer(engine) == expected
        engine.check()


def test_replay_asks_the_device_nothing(checkpoint: MakeCheckpoint) -> None:
    with (
        load(checkpoint("Qwen3Moe"), "graph", residency=0.25) as engine,
        engine._shared.stepper.open(Request(tuple(PROMPT)), lambda: None) as tokens,
    ):
        tokens.first({})
        tokens.next()  # the device decides now
        sequences: Any = engine._parts.sequences
        with syncs_are_errors():
            submitted = [sequences.submit(StepPlan([[True]] * 4, uniforms)) for uniforms in UNIFORMS]
        assert all(token >= 0 for each in submitted for (token,) in each.wait())


def test_a_model_that_cannot_be_captured_stays_eager_and_says_why(
    checkpoint: MakeCheckpoint, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), load(checkpoint("DeepseekV4"), "graph", residency=0.5) as engine:
        assert "stays eager" in said(caplog)[0]
        assert len(answer(engine)) == 48


def test_too_few_slabs_for_the_rows_stays_eager_and_says_how_many(
    checkpoint: MakeCheckpoint, caplog: pytest.LogCaptureFixture
) -> None:
    folder = checkpoint("Qwen3Moe")
    with caplog.at_level(logging.WARNING), load(folder, "graph", rows=4, slabs=8) as engine:
        assert "memory.slabs=16" in said(caplog)[0]
        assert len(answer(engine)) == 48
