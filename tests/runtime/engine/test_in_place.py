"""Engines whose misses the CPU computes: transformers' text up to rounding, counted, repeatable, unharmed."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from numba import cfunc

from hetero_runtime.engine import Engine
from hetero_runtime.errors import ConfigError, DeviceError
from hetero_runtime.in_place.native import NativeExperts
from hetero_runtime.plan import detect
from hetero_runtime.verify import tolerance_of
from hetero_scheduler.misses import ByCost
from tests.runtime.engine.answers import Answer
from tests.runtime.engine.conftest import NUM_TOKENS, PROMPT, MakeAnswer, MakeCheckpoint
from tests.runtime.engine.rest import assert_at_rest, engine_threads
from tests.runtime.engine.serving import OPTIONS, PROMPTS

HANDLERS: dict[str, dict[str, Any]] = {
    "cpu": {"handler": "cpu"},
    "hybrid": {"handler": "hybrid"},
    "half": {"handler": "hybrid", "cpu_share": 0.5},
}


def load(folder: Path, misses: str, *, backend: str = "native", device: str = "cpu", **rest: Any) -> Engine:
    settings: dict[str, Any] = {
        "device": device,
        "memory": {"residency": 0.25},
        "execution": {"mode": "eager", "max_rows": 2, "max_length": 256},
        "misses": HANDLERS[misses],
        "cpu": {"backend": backend, "threads": 2},
    }
    return Engine.load(folder, **{**settings, **rest})


def assert_close(token_ids: tuple[int, ...], logits: list[torch.Tensor], expected: Answer) -> None:
    """As far as both say the same; then the two best must have been too close to tell."""
    tolerance = tolerance_of("hybrid", "float32") * float(expected.logits.abs().max())
    for i, ours in enumerate(logits):
        assert (ours.cpu() - expected.logits[i]).abs().max() <= tolerance
        if token_ids[i] != expected.token_ids[i]:
            return


@pytest.mark.parametrize("misses", HANDLERS)
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("Qwen3Moe", "native"),
        ("DeepseekV3", "native"),
        ("DeepseekV4", "native"),
        ("GptOssMxfp4", "native"),
        ("Mixtral", "torch"),
        ("GptOss", "torch"),
        ("Qwen3MoeFp8", "torch"),
    ],
)
def test_text_is_transformers_own_up_to_rounding(
    name: str,
    backend: str,
    misses: str,
    device: str,
    *,
    checkpoint: MakeCheckpoint,
    answer: MakeAnswer,
    logits: list[torch.Tensor],
) -> None:
    with load(checkpoint(name), misses, backend=backend, device=device) as engine:
        completion = engine.generate(PROMPT[0].tolist(), max_tokens=NUM_TOKENS, ignore_eos=True)
        assert_at_rest(engine)
        stats = engine.stats()
    assert_close(completion.token_ids, logits, answer(name, device))
    in_place = stats.decode.in_place
    assert in_place.experts <= stats.decode.cache.misses
    assert (in_place.seconds > 0) == (in_place.experts > 0)
    assert stats.decode.cpu_share == in_place.experts / stats.decode.cache.required
    assert in_place.experts > 0 or misses == "hybrid"  # that one may find that loading is faster here
    assert stats.to_json()["decode"]["in_place"]["experts"] == in_place.experts


def test_without_any_slab_everything_is_computed_in_place(
    checkpoint: MakeCheckpoint, answer: MakeAnswer, logits: list[torch.Tensor]
) -> None:
    with load(checkpoint("Qwen3Moe"), "cpu", memory={"slabs": 0}) as engine:
        completion = engine.generate(PROMPT[0].tolist(), max_tokens=NUM_TOKENS, ignore_eos=True)
        assert_at_rest(engine)
        stats = engine.stats()
    assert_close(completion.token_ids, logits, answer("Qwen3Moe", "cpu"))
    assert stats.decode.cpu_share == stats.prefill.cpu_share == 1
    assert stats.prefill.cache.bytes_moved + stats.decode.cache.bytes_moved == 0


@pytest.mark.parametrize("misses", ["cpu", "half"])
def test_a_configuration_that_asks_no_clock_gives_the_same_bits_whatever_the_threads(
    misses: str, checkpoint: MakeCheckpoint, logits: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetero_runtime.in_place.build.place_workers", lambda _, number: (0,) * number)
    monkeypatch.setattr(
        "hetero_runtime.planned.detect", lambda device: replace(detect(device), usable_cores=3)
    )
    runs = []
    for threads in (1, 2, 4):
        logits.clear()
        with load(checkpoint("Qwen3Moe"), misses, cpu={"threads": threads}) as engine:
            for prompt in PROMPTS[:3]:
                engine.generate(prompt, **OPTIONS)
        runs.append([each.clone() for each in logits])
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


def test_without_slabs_the_bits_depend_on_the_prompt_alone(
    checkpoint: MakeCheckpoint, logits: list[torch.Tensor]
) -> None:
    with load(checkpoint("Qwen3Moe"), "cpu", memory={"slabs": 0}) as engine:
        engine.generate(PROMPTS[0], **OPTIONS)
        first = [each.clone() for each in logits]
        engine.generate(PROMPTS[1], **OPTIONS)
        logits.clear()
        engine.generate(PROMPTS[0], **OPTIONS)
    assert all(torch.equal(a, b) for a, b in zip(logits, first, strict=True))


@cfunc("int64(int64, int64, int64)")
def failing(plan: Any, index: Any, count: Any) -> Any:
    return 1


def test_a_failing_worker_fails_one_request_and_the_engine_goes_on(
    checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(checkpoint("Qwen3Moe"), "half") as engine:
        before = engine.generate(PROMPTS[0], **OPTIONS)
        backend = engine._parts.orchestrator._in_place.experts  # type: ignore[attr-defined]
        assert isinstance(backend, NativeExperts)
        monkeypatch.setattr(backend._experts, "_job", failing)
        with pytest.raises(DeviceError, match=r"computing experts on the CPU failed"):
            engine.generate(PROMPTS[1], **OPTIONS)
        monkeypatch.undo()
        assert_at_rest(engine)
        after = engine.generate(PROMPTS[0], **OPTIONS)
        assert len(after.token_ids) == len(before.token_ids)
    assert engine_threads() == []


def test_a_cpu_that_loses_is_given_up_and_the_log_says_so_once(
    checkpoint: MakeCheckpoint, caplog: pytest.LogCaptureFixture
) -> None:
    with load(checkpoint("Qwen3Moe"), "hybrid") as engine:
        policy = engine._parts.orchestrator._in_place.policy  # type: ignore[attr-defined]
        assert isinstance(policy, ByCost)
        policy.costs._in_place_now.value = 1e9
        with caplog.at_level(logging.WARNING):
            for prompt in 3 * PROMPTS:
                engine.generate(prompt, **OPTIONS)
        assert policy.is_lost
    said = [record for record in caplog.records if "misses are all loaded from now on" in record.message]
    assert len(said) == 1
    assert "ms on the CPU" in said[0].message


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("GptOss", {}, r"cpu.backend: native cannot compute these experts: weights lie transposed"),
        ("Qwen3Moe", {"cpu": {"isa": "neon"}}, r"cpu.isa: neon does not execute on this machine"),
    ],
)
def test_what_cannot_be_computed_is_refused_before_weights_are_read(
    name: str, settings: dict[str, Any], message: str, checkpoint: MakeCheckpoint, monkeypatch: Any
) -> None:
    def reading(*_: Any, **__: Any) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr("hetero_runtime.assembly.load_backbone", reading)
    with pytest.raises(ConfigError, match=message):
        load(checkpoint(name), "cpu", **settings)


_PEAKS = """
import re, sys
from pathlib import Path
from hetero_runtime import Engine
for handler in ("load", "hybrid"):
    with Engine.load(
        sys.argv[1], device="cpu", memory={"residency": 0.25}, misses={"handler": handler},
        execution={"max_length": 256},
    ) as engine:
        engine.generate(list(range(20, 60)), max_tokens=24, ignore_eos=True)
    # getrusage would count what the parent held when it made this process
    print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


def test_hybrid_takes_less_than_200_mb_more_than_load(checkpoint: MakeCheckpoint) -> None:
    """Peaks of a process that loads first and then splits: the compiler, the kernels and their workspace come
    on top, and no second copy of the weights."""
    done = subprocess.run(
        [sys.executable, "-c", _PEAKS, str(checkpoint("Qwen3Moe"))],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"},
    )
    load_kib, hybrid_kib = map(int, done.stdout.split())
    assert (hybrid_kib - load_kib) * 1024 < 200e6
