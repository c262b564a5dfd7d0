"""Checkpoints and transformers' answers, made once for all tests of the engine."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_runtime.config import load_config
from hetero_runtime.engine import Engine
from hetero_runtime.expert_file.pack import pack
from hetero_runtime.hf.forward import SequenceState
from hetero_runtime.planned import decide
from tests.architectures import build_checkpoint, prompt_ids, reference_model
from tests.runtime.engine.answers import Answer, aligned, transformers_answer
from tests.runtime.engine.rest import Banks, assert_at_rest, engine_threads, num_open_files
from tests.runtime.engine.serving import OPTIONS, PROMPTS, Alone, Said, Serve, load, say

NUM_TOKENS = 64
PROMPT = prompt_ids(17)

MakeCheckpoint = Callable[..., Path]
MakeAnswer = Callable[..., Answer]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where engine and reference run."""
    return str(request.param)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """`checkpoint(name, dtype)`: the folder of a tiny model. Shared: a test that changes it copies it."""

    @cache
    def build(name: str, dtype: torch.dtype = torch.float32) -> Path:
        return build_checkpoint(name, tmp_path_factory.mktemp(name), dtype=dtype)

    return build


@pytest.fixture(scope="session")
def answer(checkpoint: MakeCheckpoint) -> MakeAnswer:
    """`answer(name, device, dtype)`: what transformers answers to `PROMPT`."""

    @cache
    def ask(name: str, device: str, dtype: torch.dtype = torch.float32) -> Answer:
        model = aligned(reference_model(checkpoint(name, dtype), dtype=dtype)).to(device)
        return transformers_answer(model, {"input_ids": PROMPT}, num_tokens=NUM_TOKENS)

    return ask


@pytest.fixture(scope="session")
def packed_model(checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its expert file beside it."""
    folder = tmp_path_factory.mktemp("packed") / "model"
    shutil.copytree(checkpoint("Qwen3Moe"), folder)
    config = decide(load_config({"model": {"path": str(folder)}, "device": "cpu"})).config
    pack(config, folder.with_name("model.experts.safetensors"))
    return folder


@pytest.fixture(scope="session")
def packed_answers(packed_model: Path) -> Said:
    """What `packed_model` says with all experts on device cpu."""
    with Engine.load(packed_model, device="cpu", memory={"slabs": "all"}) as engine:
        return say(engine)


@pytest.fixture
def logits(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Grows by the logits `[vocab]` of every pass of any engine."""
    seen: list[torch.Tensor] = []
    extend = SequenceState.extend

    def recording_extend(self: SequenceState, *args: Any) -> torch.Tensor:
        seen.append(extend(self, *args))
        return seen[-1]

    monkeypatch.setattr(SequenceState, "extend", recording_extend)
    return seen


@pytest.fixture
def banks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Banks]:
    """The host banks that a test makes; after it no bank, no open file and no thread is left."""
    banks, num_files = Banks(monkeypatch), num_open_files()
    yield banks
    assert banks.num_open == 0
    assert num_open_files() == num_files
    assert engine_threads() == []


@pytest.fixture
def alone(checkpoint: MakeCheckpoint, device: str) -> Iterator[Alone]:
    """`alone(prompt, **options)`: what an engine says that serves nobody else and holds all experts."""
    with load(checkpoint("Qwen3Moe"), device, slabs="all") as engine:
        yield lambda prompt, **options: engine.generate(prompt, **{**OPTIONS, **options})


@pytest.fixture
def serve(checkpoint: MakeCheckpoint, device: str, alone: Alone) -> Iterator[Serve]:
    """`serve(max_rows=2)`: an engine that after the test is at rest and still serves."""
    engines: list[Engine] = []

    def start(**options: Any) -> Engine:
        engines.append(load(checkpoint("Qwen3Moe"), device, **options))
        return engines[-1]

    yield start
    for engine in engines:
        assert_at_rest(engine)
        assert engine.generate(PROMPTS[0], **OPTIONS).token_ids == alone(PROMPTS[0]).token_ids
        engine.close()
    assert engine_threads() == []
