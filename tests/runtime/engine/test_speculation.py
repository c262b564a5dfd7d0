"""Speculation changes how many passes an answer takes, and nothing that a caller sees."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hetero_runtime.assembly import assemble
from hetero_runtime.config import load_config
from hetero_runtime.engine import Engine
from hetero_runtime.errors import CheckpointError, ConfigError
from hetero_runtime.plan.report import to_json
from hetero_runtime.planned import plan_for
from hetero_runtime.speculation import Speculation
from hetero_runtime.trace.recorder import TraceSettings, record_trace
from hetero_runtime.verify import verify
from tests.architectures import ARCHITECTURES
from tests.runtime.engine.conftest import NUM_TOKENS, PROMPT, MakeAnswer, MakeCheckpoint
from tests.runtime.engine.rest import assert_at_rest
from tests.runtime.engine.serving import LONG, OPTIONS, PROMPTS, Alone
from tests.runtime.engine.test_serving import CancelAtLook
from tests.runtime.speculation.drafters import build_drafter, nearly
from tests.runtime.speculation.imagined import OneRow, OracleRow

REFUSED = "DeepseekV4"
SETTINGS: dict[str, Any] = {"execution": {"mode": "eager", "max_rows": 2, "max_length": 256}}
ON_CPU: dict[str, Any] = {"device": "cpu", **SETTINGS}

Speculating = Callable[..., Engine]


@pytest.fixture
def drafter(checkpoint: MakeCheckpoint, tmp_path: Path) -> Path:
    """Drafts that are right most of the time, for Qwen3Moe."""
    return nearly(checkpoint("Qwen3Moe"), tmp_path / "drafter", noise=0.3)


@pytest.fixture
def speculating(checkpoint: MakeCheckpoint, drafter: Path, device: str) -> Any:
    """`speculating(k=4)`: a Qwen3Moe engine with that drafter; it is at rest after the test."""
    engines: list[Engine] = []

    def start(k: int = 4) -> Engine:
        sections = {
            "memory": {"residency": 0.25},
            "speculation": {"drafter": "autoregressive", "model": str(drafter), "k": k},
        }
        engines.append(Engine.load(checkpoint("Qwen3Moe"), device=device, **sections, **SETTINGS))
        return engines[-1]

    yield start
    for engine in engines:
        assert_at_rest(engine)
        engine.close()


# ---- the same tokens


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != REFUSED])
def test_greedy_text_of_every_architecture(
    name: str, device: str, *, checkpoint: MakeCheckpoint, answer: MakeAnswer
) -> None:
    """Half of the drafts are wrong somewhere; all of them are longer than some sliding windows."""
    expected = answer(name, device).token_ids
    config = load_config(
        {
            "model": {"path": str(checkpoint(name))},
            "memory": {"residency": 0.3},
            "speculation": {"drafter": "prompt_lookup"},
            "device": device,
            **SETTINGS,
        }
    )
    parts = assemble(plan_for(config).config)
    parts.speculation = Speculation(OneRow(OracleRow(PROMPT.shape[1], expected, every=7)), k=10)
    with Engine(parts) as engine:
        completion = engine.generate(PROMPT[0].tolist(), max_tokens=NUM_TOKENS, ignore_eos=True)
        assert_at_rest(engine)
        stats = engine.stats()
    assert list(completion.token_ids) == expected
    assert stats.decode.tokens == stats.drafts.passes + stats.drafts.accepted == NUM_TOKENS - 1
    assert stats.decode.passes == stats.drafts.passes < NUM_TOKENS // 2


@pytest.mark.parametrize("drafter_name", ["prompt_lookup", "autoregressive", "block"])
def test_greedy_text_of_the_bundled_model(drafter_name: str) -> None:
    """Trained weights, in float32: a text that repeats itself, so that much is accepted."""
    prompt = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n"
    settings: dict[str, Any] = {"model": {"dtype": "float32"}, "memory": {"residency": 0.25}, **ON_CPU}
    with Engine.load(None, **settings) as engine:
        plain = engine.generate(prompt, max_tokens=48, ignore_eos=True)
        own = str(engine.config.model.path)
    speculation = {"drafter": drafter_name, "k": 6}
    speculation |= {"model": own} if drafter_name == "autoregressive" else {}
    with Engine.load(None, speculation=speculation, **settings) as engine:
        completion = engine.generate(prompt, max_tokens=48, ignore_eos=True)
        drafts = engine.stats().drafts
    assert completion.token_ids == plain.token_ids
    assert drafts.tokens_per_pass > 1.5


def test_a_drafter_that_is_mostly_right(speculating: Speculating, alone: Alone) -> None:
    engine = speculating(k=4)
    for prompt in PROMPTS[:3]:
        assert engine.generate(prompt, **OPTIONS).token_ids == alone(prompt).token_ids
    drafts = engine.stats().drafts
    assert 0 < drafts.accepted < drafts.drafted


def test_a_repetition_penalty_sees_accepted_tokens(speculating: Speculating, alone: Alone) -> None:
    engine, options = speculating(k=6), {**OPTIONS, "repetition_penalty": 1.6}
    completion = engine.generate(PROMPTS[1], **options)
    assert completion.token_ids == alone(PROMPTS[1], **options).token_ids
    assert completion.token_ids != alone(PROMPTS[1]).token_ids
    assert engine.stats().drafts.accepted > 0


def test_a_drafter_that_knows_nothing(
    checkpoint: MakeCheckpoint, tmp_path: Path, device: str, alone: Alone
) -> None:
    speculation = {"drafter": "autoregressive", "model": str(build_drafter(tmp_path)), "k": 3}
    with Engine.load(checkpoint("Qwen3Moe"), speculation=speculation, device=device, **SETTINGS) as engine:
        assert engine.generate(PROMPTS[0], **OPTIONS).token_ids == alone(PROMPTS[0]).token_ids
        assert engine.stats().drafts.tokens_per_pass < 1.3


def test_sampled_texts_differ_by_seed_alone(speculating: Speculating) -> None:
    engine = speculating()
    texts = [
        engine.generate(PROMPTS[0], temperature=0.9, seed=seed, **OPTIONS).token_ids for seed in (1, 2, 1)
    ]
    assert texts[0] == texts[2] != texts[1]


# ---- what a caller sees


def test_rows_together(speculating: Speculating, alone: Alone) -> None:
    engine = speculating()
    with ThreadPoolExecutor(2) as pool:
        completions = list(pool.map(lambda prompt: engine.generate(prompt, **OPTIONS), PROMPTS[:6]))
    assert [c.token_ids for c in completions] == [alone(prompt).token_ids for prompt in PROMPTS[:6]]


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 6])
def test_max_tokens_inside_a_draft(speculating: Speculating, alone: Alone, max_tokens: int) -> None:
    completion = speculating(k=8).generate(PROMPTS[1], **{**OPTIONS, "max_tokens": max_tokens})
    assert completion.finish_reason == "length"
    assert completion.token_ids == alone(PROMPTS[1]).token_ids[:max_tokens]


def test_an_end_token_or_stop_string_inside_a_draft(speculating: Speculating, alone: Alone) -> None:
    engine, whole = speculating(k=12), alone(PROMPTS[1])
    stop = whole.text[5:8]
    completion = engine.generate(PROMPTS[1], stop=(stop,), **OPTIONS)
    assert completion.finish_reason == "stop"
    assert completion.text == whole.text[: whole.text.index(stop)]
    engine._parts.eos_token_ids = frozenset({whole.token_ids[4]})
    completion = engine.generate(PROMPTS[1], max_tokens=24)
    first = whole.token_ids.index(whole.token_ids[4])
    assert completion.finish_reason == "stop"
    assert completion.token_ids == whole.token_ids[: first + 1]


def test_a_stream_gives_token_by_token(speculating: Speculating, alone: Alone) -> None:
    deltas = list(speculating().stream(PROMPTS[2], **OPTIONS))
    assert tuple(delta.token_id for delta in deltas) == alone(PROMPTS[2]).token_ids
    assert "".join(delta.text for delta in deltas) == alone(PROMPTS[2]).text
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)


@pytest.mark.parametrize("look", range(0, 24, 3))
def test_cancellation_anywhere(speculating: Speculating, alone: Alone, look: int) -> None:
    """Between layers, and between tokens of a draft."""
    engine = speculating()
    completion = engine.generate(PROMPTS[3], cancel=CancelAtLook(look), **LONG)
    assert completion.finish_reason == "cancelled"
    assert completion.token_ids == alone(PROMPTS[3]).token_ids[: len(completion.token_ids)]
    assert engine.generate(PROMPTS[0], **OPTIONS).token_ids == alone(PROMPTS[0]).token_ids


def test_a_deadline(speculating: Speculating) -> None:
    completion = speculating().generate(PROMPTS[3], timeout_s=0.15, **LONG)
    assert completion.finish_reason == "deadline"
    assert len(completion.token_ids) < LONG["max_tokens"]


# ---- what is refused, and what is planned


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"speculation": {"drafter": "autoregressive"}}, r"name its folder in speculation\.model"),
        ({"speculation": {"drafter": "prompt_lookup", "model": "x"}}, r"speculation\.model: x is for"),
        ({"speculation": {"k": 4}}, r"speculation\.k: 4 is for a drafter"),
        ({"speculation": {"drafter": "autoregressive", "model": "/no/where"}}, "/no/where is no folder"),
        (
            {"speculation": {"drafter": "prompt_lookup"}, "preset": "seqmoe"},
            r"prompt_lookup with prefetch\.schedule: jsd is not in this version",
        ),
        (
            {"speculation": {"drafter": "prompt_lookup"}, "execution": {"mode": "graph"}},
            r"checks 7 drafted tokens at most; write speculation\.k: 7",
        ),
        (
            {"speculation": {"drafter": "block", "k": 7}, "execution": {"mode": "graph"}},
            r"drafter: block with execution\.mode: graph is not in this version",
        ),
        (
            {
                "speculation": {"drafter": "prompt_lookup", "k": 7},
                "execution": {"mode": "graph"},
                "routing": {"policy": "block_selection"},
            },
            r"block_selection with execution\.mode: graph is not in this version",
        ),
    ],
)
def test_settings_that_clash(sections: dict[str, Any], message: str, checkpoint: MakeCheckpoint) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_for(load_config({"model": {"path": str(checkpoint("Qwen3Moe"))}, "device": "cpu"} | sections))


def test_a_model_that_cannot_go_back_is_refused_before_it_is_read(checkpoint: MakeCheckpoint) -> None:
    with pytest.raises(ConfigError, match=r"cannot serve deepseek_v4: .*write speculation\.drafter: none"):
        Engine.load(checkpoint(REFUSED), speculation={"drafter": "prompt_lookup"}, **ON_CPU)


def test_another_vocabulary_is_refused_before_the_experts_are_read(
    checkpoint: MakeCheckpoint, banks: Any
) -> None:
    bundled = plan_for(load_config(None)).config.model.path
    speculation = {"drafter": "autoregressive", "model": str(bundled)}
    with pytest.raises(CheckpointError, match="another vocabulary"):
        Engine.load(checkpoint("Qwen3Moe"), speculation=speculation, **ON_CPU)
    assert banks.num_made == 0


def test_the_plan_counts_the_drafter(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    drafter = build_drafter(tmp_path)
    base = {"model": {"path": str(checkpoint("Qwen3Moe"))}, **ON_CPU}
    asked = base | {"speculation": {"drafter": "autoregressive", "model": str(drafter)}}
    plain, ours = (to_json(plan_for(load_config(config)).memory) for config in (base, asked))
    rows = {row["name"]: row for row in ours["rows"]}
    assert "drafter" not in {row["name"] for row in plain["rows"]}
    weights = 4 * (2 * 264 * 32 + 2 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48 + 2 * 32) + 32)
    cache = 2 * 256 * (2 * 2 * 16) * 4  # rows, tokens, layers × keys and values × size, float32
    assert rows["drafter"]["load_bytes"] == weights
    assert rows["drafter"]["decode_bytes"] == weights + cache


def test_what_runs_step_by_step_takes_no_drafter(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    settings = {"model": {"path": str(checkpoint("Qwen3Moe"))}, "speculation": {"drafter": "prompt_lookup"}}
    planned = plan_for(load_config(settings | ON_CPU))
    with pytest.raises(ConfigError, match=r"of single steps; write speculation\.drafter: none"):
        verify([planned])
    with pytest.raises(ConfigError, match=r"step by step; write speculation\.drafter: none"):
        record_trace(planned.config, ["text"], tmp_path / "trace", settings=TraceSettings())
