"""Routing policies in the engine: decisions depend on tokens and policy, on nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hetero_runtime.assembly import Parts, assemble
from hetero_runtime.engine import Engine
from hetero_runtime.errors import ConfigError
from hetero_runtime.generation import CancelToken
from hetero_runtime.hf.forward import forward_rows
from hetero_runtime.hf.routing_record import record_routing
from hetero_runtime.orchestrator import Phase
from hetero_runtime.planned import plan_for
from hetero_runtime.routing import RoutingStats, TextPart
from hetero_runtime.source import config_from
from hetero_runtime.tiers import supply
from hetero_runtime.trace.recorder import TraceSettings, record_trace
from hetero_runtime.verify.verify import verify
from tests.gpu.random_copier import RandomCopier
from tests.runtime.calibration.calibrations import write_random_calibration
from tests.runtime.engine.answers import assert_same_answer
from tests.runtime.engine.conftest import NUM_TOKENS, PROMPT, MakeAnswer, MakeCheckpoint
from tests.runtime.engine.serving import OPTIONS, PROMPTS

POLICIES: dict[str, dict[str, Any]] = {
    "psr": {"policy": "psr", "bonus": 0.3},
    "psr, lru, n 2": {"policy": "psr", "priority": "lru", "insertions": 2, "window": 6},
    "cache_prior": {"policy": "cache_prior", "bonus": 0.3},
    "cache_prior as published": {"policy": "cache_prior", "protected": 2, "range": "running"},
    "speculative": {"policy": "speculative_experts"},
}


def calibrated(folder: Path) -> Path:
    write_random_calibration(folder)
    return folder


def settings(folder: Path, routing: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """A configuration; bounded copies ahead wherever the policy inserts."""
    inserts = routing["policy"] != "cache_prior"
    return {
        "model": {"path": str(folder)},
        "device": "cpu",
        "memory": {"residency": 0.5, "pool": "per_layer"},
        "routing": {"capacity": 6, **routing},
        "prediction": {"predictor": "none"},
        "prefetch": {"schedule": "bounded" if inserts else "none"},
        "eviction": {"policy": "logical"},
        "execution": {"max_rows": 2, "max_length": 256},
        **sections,
    }


@contextmanager
def assembled(folder: Path, routing: dict[str, Any], **sections: Any) -> Iterator[Parts]:
    parts = assemble(plan_for(config_from(settings(folder, routing, **sections), {})).config)
    try:
        yield parts
    finally:
        parts.close()


# ---- exact where it must be


@pytest.mark.parametrize("name", ["Olmoe", "Qwen3Next", "DeepseekV3", "Moonlight", "MiniMaxM2", "GptOss"])
def test_without_a_bonus_answers_are_transformers_own(
    name: str, *, checkpoint: MakeCheckpoint, answer: MakeAnswer, logits: list[torch.Tensor]
) -> None:
    config = settings(calibrated(checkpoint(name)), {"policy": "psr", "bonus": 0.0})
    with Engine.load(config) as engine:
        completion = engine.generate(PROMPT[0].tolist(), max_tokens=NUM_TOKENS, ignore_eos=True)
        engine.check()
        routed = engine.stats().decode.routing
    assert_same_answer(completion.token_ids, logits, answer(name, "cpu"), device="cpu")
    assert routed.deviating == 0
    assert routed.inserted > 0


def test_an_image_is_a_prompt_like_any_other(checkpoint: MakeCheckpoint) -> None:
    folder = calibrated(checkpoint("Qwen3VLMoe"))
    image = {"type": "image", "image": Image.new("RGB", (64, 64), "red")}
    messages = [{"role": "user", "content": [image, {"type": "text", "text": "what is it"}]}]
    said = []
    for routing in ({"policy": "exact"}, {"policy": "psr", "bonus": 0.0}, POLICIES["psr"]):
        exact = {"routing": routing, "eviction": {}, "prefetch": {}} if routing["policy"] == "exact" else {}
        with Engine.load({**settings(folder, routing), **exact}) as engine:
            said.append(engine.generate(messages, **OPTIONS).token_ids)
            engine.check()
    assert said[0] == said[1] != said[2]


# ---- one function, whichever way it is run


@pytest.mark.parametrize("name", ["Olmoe", "Qwen2Moe", "DeepseekV3"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_at_once_is_the_prompt_token_by_token(
    name: str, policy: str, *, checkpoint: MakeCheckpoint
) -> None:
    ids = torch.tensor(PROMPTS[5])
    with assembled(calibrated(checkpoint(name)), POLICIES[policy]) as parts:
        at_once = _decisions(parts, Phase.PREFILL, [ids])
        one_by_one = _decisions(parts, Phase.DECODE, list(ids.split(1)))
        halved = _decisions(parts, Phase.PREFILL, list(ids.split(20)))
    assert at_once.stats.deviating > 0, "a policy that changes nothing proves nothing"
    assert at_once == one_by_one == halved


class Decided:
    """Experts `[T, L, top_k]` and counts."""

    def __init__(self, experts: np.ndarray, stats: RoutingStats) -> None:
        self.experts, self.stats = experts, stats

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Decided)
        return self.stats == other.stats and np.array_equal(self.experts, other.experts)

    __hash__ = None  # type: ignore[assignment]


def _decisions(parts: Parts, phase: Phase, passes: list[torch.Tensor]) -> Decided:
    assert parts.routing is not None
    before = parts.routing.stats()
    with record_routing(parts.model) as record, parts.sequences.open() as sequence:
        for ids in passes:
            with parts.orchestrator.pass_(phase, checkpoint=lambda: None):
                sequence.extend(ids)
        experts = record.take().top_k.numpy()
    parts.orchestrator.check()
    return Decided(experts, parts.routing.stats() - before)


def test_rows_of_a_pass_are_texts_of_their_own(checkpoint: MakeCheckpoint) -> None:
    """Filled up at their end, as a batch is; decisions are those of each text alone."""
    texts = [torch.tensor(PROMPTS[i]) for i in (5, 1, 3)]
    longest = max(map(len, texts))
    with assembled(calibrated(checkpoint("Olmoe")), POLICIES["psr"]) as parts:
        alone = [_decisions(parts, Phase.PREFILL, [ids]) for ids in texts]
        assert parts.routing is not None
        before = parts.routing.stats()
        rows = [TextPart(parts.routing.new_cache(), ids.numpy()) for ids in texts]
        padded = torch.stack([torch.nn.functional.pad(ids, (0, longest - len(ids))) for ids in texts])
        with (
            record_routing(parts.model) as record,
            parts.orchestrator.pass_(Phase.PREFILL, checkpoint=lambda: None),
            parts.routing.pass_of(rows),
        ):
            forward_rows(parts.model, padded)
            experts = record.take().top_k.numpy().reshape(3, longest, 3, -1)
        stats = parts.routing.stats() - before
    for row, ids, expected in zip(experts, texts, alone, strict=True):
        np.testing.assert_array_equal(row[: len(ids)], expected.experts)
    assert stats == sum((each.stats for each in alone), RoutingStats())


# ---- timing changes nothing

SLABS: dict[str, dict[str, Any]] = {
    "half": {"residency": 0.5, "pool": "per_layer"},
    "least": {"slabs": 12, "pool": "per_layer"},
    "one small pool": {"slabs": 6},
    "all": {"slabs": "all"},
}
IN_FLIGHT = (1, 2, 4)


def test_outputs_and_counts_are_the_same_on_every_link(
    checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch, logits: list[torch.Tensor]
) -> None:
    """20 runs: copies in flight, slabs and delays differ; bits and logical copies do not."""
    folder = calibrated(checkpoint("Qwen3Moe"))
    runs = itertools.islice(itertools.cycle(itertools.product(SLABS, IN_FLIGHT)), 20)
    said, num_late = set(), 0
    for seed, (slabs, in_flight) in enumerate(runs):
        link = RandomCopier(patience=(0.0, 0.6, 0.95)[seed % 3], seed=seed)
        monkeypatch.setattr(supply, "make_copier", lambda *_, link=link, **__: link)
        prefetch = {"schedule": "bounded", "in_flight": in_flight}
        config = settings(folder, POLICIES["psr"], memory=SLABS[slabs], prefetch=prefetch)
        logits.clear()
        with Engine.load(config) as engine:
            tokens = engine.generate(PROMPTS[2], **OPTIONS).token_ids
            engine.check()
            stats = engine.stats()
        num_late += stats.decode.cache.late
        bits = torch.stack(logits).numpy().tobytes()
        said.add((tokens, bits, stats.prefill.routing, stats.decode.routing))
    assert len(said) == 1
    assert num_late > 0, "no copy was ever late: the links were all alike"


@pytest.mark.parametrize("eviction", ["lru", "logical"])
@pytest.mark.parametrize("schedule", ["none", "popularity", "bounded"])
def test_how_slabs_are_kept_and_filled_changes_nothing(
    eviction: str, schedule: str, *, checkpoint: MakeCheckpoint
) -> None:
    folder = calibrated(checkpoint("Qwen3Moe"))
    config = settings(folder, POLICIES["psr"], eviction={"policy": eviction}, prefetch={"schedule": schedule})
    with Engine.load(settings(folder, POLICIES["psr"])) as engine:
        expected = engine.generate(PROMPTS[3], **OPTIONS).token_ids
    with Engine.load(config) as engine:
        assert engine.generate(PROMPTS[3], **OPTIONS).token_ids == expected
        assert (engine.stats().decode.cache.prefetches > 0) == (schedule == "bounded")


def test_texts_by_turns_say_what_each_says_alone(checkpoint: MakeCheckpoint) -> None:
    with Engine.load(settings(calibrated(checkpoint("Qwen3Moe")), POLICIES["psr"])) as engine:
        alone = [engine.generate(prompt, **OPTIONS).token_ids for prompt in PROMPTS[:4]]
        with ThreadPoolExecutor(4) as pool:
            together = list(
                pool.map(lambda prompt: engine.generate(prompt, **OPTIONS).token_ids, PROMPTS[:4])
            )
        engine.check()
    assert together == alone


def test_a_request_given_up_leaves_nothing_behind(checkpoint: MakeCheckpoint) -> None:
    with Engine.load(settings(calibrated(checkpoint("Qwen3Moe")), POLICIES["psr"])) as engine:
        expected = engine.generate(PROMPTS[0], **OPTIONS).token_ids
        cancel = CancelToken()
        for number, _ in enumerate(engine.stream(PROMPTS[4], **OPTIONS, cancel=cancel)):
            if number == 3:
                cancel.cancel()
        engine.check()
        assert engine.generate(PROMPTS[0], **OPTIONS).token_ids == expected


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Qwen3Moe", "DeepseekV3"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_captured_step_says_what_the_eager_engine_says(
    name: str, policy: str, *, checkpoint: MakeCheckpoint
) -> None:
    folder, said = calibrated(checkpoint(name)), []
    for mode in ("eager", "graph"):
        execution = {"mode": mode, "max_rows": 1, "max_length": 128}
        config = settings(folder, POLICIES[policy], device="cuda", execution=execution)
        with Engine.load(config) as engine:
            tokens = [engine.generate(prompt, **OPTIONS).token_ids for prompt in PROMPTS[:3]]
            engine.check()
            stats = engine.stats()
        said.append((tokens, stats.prefill.routing, stats.decode.routing))
    assert said[0] == said[1]


# ---- copies


def test_slabs_mirror_the_logical_cache(checkpoint: MakeCheckpoint) -> None:
    """With as many slabs as the logical cache has places and a link that is quick, nothing else is copied:
    what a layer demands is what its logical cache lacked."""
    config = settings(calibrated(checkpoint("Qwen3Moe")), {**POLICIES["psr"], "capacity": "auto"})
    with Engine.load(config) as engine:
        engine.generate(PROMPTS[6], max_tokens=8, ignore_eos=True)  # what the warm set lacks is copied
        before = engine.stats().decode
        engine.generate(PROMPTS[6], max_tokens=64, ignore_eos=True)
        after = engine.stats().decode
        cache, routed = after.cache - before.cache, after.routing - before.routing
    assert routed.inserted > 20
    assert cache.misses <= routed.demanded * 1.1 + 6
    assert cache.prefetches <= routed.inserted * 1.1 + 6
    assert routed.demanded * 0.9 <= cache.misses


# ---- refusals


def test_a_model_without_a_calibration_is_refused(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    missing = {"policy": "psr", "calibration": str(tmp_path / "none.safetensors")}
    with pytest.raises(
        ConfigError, match="does not exist; calibrate with `hetero-runtime calibrate routing`"
    ):
        Engine.load(settings(checkpoint("Olmoe"), missing))


def test_routers_that_look_at_token_ids_are_refused(checkpoint: MakeCheckpoint) -> None:
    folder = calibrated(checkpoint("DeepseekV4"))
    with pytest.raises(ConfigError, match="psr does not cover DeepseekV4ForCausalLM"):
        Engine.load(settings(folder, {"policy": "psr"}))


def test_what_is_about_the_model_itself_refuses_a_policy(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    planned = plan_for(config_from(settings(calibrated(checkpoint("Olmoe")), {"policy": "psr"}), {}))
    with pytest.raises(ConfigError, match="on purpose, and verify compares with the model"):
        verify([planned])
    with pytest.raises(ConfigError, match="on purpose, and a trace is of the model's own routing"):
        record_trace(planned.config, ["text"], tmp_path / "trace", settings=TraceSettings())
