"""How an engine decodes where nobody names a mode: by captured steps wherever they can be."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_runtime import planned
from hetero_runtime.config import load_config
from hetero_runtime.config.tree import ResolvedConfig
from hetero_runtime.engine import Engine
from hetero_runtime.plan import Gpu, detect
from hetero_runtime.planned import plan_for
from hetero_runtime.verify import verify
from tests.architectures import build_checkpoint, prompt_ids
from tests.runtime.calibration.calibrations import write_random_calibration
from tests.runtime.engine.conftest import MakeCheckpoint
from tests.runtime.foresight.predictors import write_random_lookahead, write_random_predictor
from tests.runtime.steps_on_cpu import steps_on_cpu

PROMPT = prompt_ids(17)[0].tolist()
LEARNED: dict[str, Callable[[Path], object]] = {
    "lru": lambda _folder: None,
    "seqmoe": write_random_predictor,
    "vismmoe": write_random_lookahead,
    "psr": write_random_calibration,
}
"""By preset, what has to lie beside the model."""


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graphics card that the host plays, its captured steps uncaptured."""
    if torch.cuda.is_available():
        pytest.skip("the interpreter stands in where there is no GPU")
    gpu = Gpu("a card", 1 << 40, 1 << 40)
    monkeypatch.setattr(planned, "detect", lambda device: replace(detect("cpu"), gpu=gpu, has_triton=True))
    monkeypatch.setattr(ResolvedConfig, "torch_device", "cpu")
    steps_on_cpu(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of its own: what lies beside it is for no other test."""
    return build_checkpoint("Qwen3Moe", tmp_path / "model")


def answer(folder: Path, num_tokens: int, **sections: Any) -> tuple[str, tuple[int, ...]]:
    """How an engine on a GPU decodes, and what it says."""
    sections["execution"] = {"max_rows": 2, "max_length": 128, **sections.get("execution", {})}
    with Engine.load(folder, device="cuda", **sections) as engine:
        said = engine.generate(PROMPT, max_tokens=num_tokens, ignore_eos=True).token_ids
        engine.check()
        assert engine.config.execution.mode == engine.stats().mode == engine.stats().to_json()["mode"]
        return engine.stats().mode, said


def assert_default_is_captured(folder: Path, preset: str, *, num_tokens: int) -> None:
    LEARNED[preset](folder)
    sections = {"preset": preset, "memory": {"residency": 0.8}}
    mode, said = answer(folder, num_tokens, **sections)
    assert mode == "graph"
    assert ("eager", said) == answer(folder, num_tokens, **sections, execution={"mode": "eager"})


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("preset", ["lru", "vismmoe", "psr"])  # Mamba2's kernels are slow to interpret
def test_presets_decode_by_captured_steps(preset: str, folder: Path) -> None:
    assert_default_is_captured(folder, preset, num_tokens=3)


@pytest.mark.gpu
@pytest.mark.parametrize("preset", LEARNED)
def test_presets_decode_by_captured_steps_on_a_gpu(preset: str, folder: Path) -> None:
    assert_default_is_captured(folder, preset, num_tokens=48)


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "needs the host": ("DeepseekV4", {}),
    "few slabs": ("Qwen3Moe", {"memory": {"slabs": 4}}),
    "many rows": ("Qwen3Moe", {"execution": {"max_rows": 9}}),
    "long drafts": ("Qwen3Moe", {"speculation": {"drafter": "prompt_lookup"}}),
}


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(("name", "sections"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_captured_decodes_eagerly(
    name: str, sections: dict[str, Any], checkpoint: MakeCheckpoint
) -> None:
    assert answer(checkpoint(name), 3, **sections)[0] == "eager"


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "sections"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_captured_decodes_eagerly_on_a_gpu(
    name: str, sections: dict[str, Any], *, checkpoint: MakeCheckpoint, caplog: pytest.LogCaptureFixture
) -> None:
    """And is never tried."""
    with caplog.at_level(logging.WARNING):
        assert answer(checkpoint(name), 16, **sections)[0] == "eager"
    assert "stays eager" not in caplog.text


@pytest.mark.gpu
def test_a_gpus_captured_steps_are_verified(folder: Path) -> None:
    tree = {
        "model": {"path": str(folder)},
        "device": "cuda",
        "memory": {"residency": 0.5},
        "execution": {"max_rows": 2, "max_length": 256},
    }
    (result,) = verify([plan_for(load_config(tree))], max_tokens=32)
    assert result.mode == "graph"
    assert result.tokens_equal
    assert result.agrees


@pytest.mark.gpu
def test_what_is_fastest_on_a_gpu_is_tried_as_it_would_serve(folder: Path) -> None:
    memory = {"residency": 0.8}
    mode, said = answer(folder, 32, preset="auto", memory=memory)
    assert mode == "graph"
    assert said == answer(folder, 32, memory=memory, execution={"mode": "eager"})[1]
