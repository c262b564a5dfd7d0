"""An engine that loads its host bank from a packed file: quantising is paid once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_runtime.config import load_config
from hetero_runtime.engine import Engine
from hetero_runtime.errors import CheckpointError, ConfigError
from hetero_runtime.expert_file.header import read_expert_header
from hetero_runtime.expert_file.pack import for_packing, pack
from hetero_runtime.planned import decide, plan_for
from tests.architectures import build_checkpoint
from tests.runtime.engine.answers import assert_same_answer
from tests.runtime.engine.conftest import NUM_TOKENS, PROMPT, MakeAnswer, MakeCheckpoint
from tests.runtime.engine.test_exactness import load
from tests.runtime.expert_file.packing import flip


def packed(folder: Path, out: Path, experts: str = "checkpoint") -> Path:
    """`folder`'s experts in a file."""
    settings = load_config({"model": {"path": str(folder), "experts": experts}})
    pack(decide(for_packing(settings)).config, out)
    return out


def say(engine: Engine) -> list[int]:
    return list(engine.generate(PROMPT[0].tolist(), max_tokens=NUM_TOKENS, ignore_eos=True).token_ids)


@pytest.mark.parametrize(
    ("name", "experts"),
    [("Qwen3Moe", "checkpoint"), ("GptOss", "checkpoint"), ("Qwen3Moe", "int8"), ("GptOss", "int4")],
)
def test_it_is_the_engine_that_reads_the_checkpoint(
    name: str, experts: str, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    folder, settings = checkpoint(name), {"model": {"experts": experts}}
    file = str(packed(folder, tmp_path / "a.experts", experts))
    with load(folder, "cpu", **settings) as engine:
        expected, errors = say(engine), engine.weight_errors()
        records = engine._parts.store.records.clone()
    with load(folder, "cpu", **settings, memory={"expert_file": file, "residency": 0.25}) as engine:
        assert torch.equal(engine._parts.store.records, records)
        assert (say(engine), engine.weight_errors()) == (expected, errors)
        engine.check()


@pytest.mark.parametrize("backing", ["ram", "swap"])
def test_it_says_what_transformers_says(
    backing: str,
    checkpoint: MakeCheckpoint,
    answer: MakeAnswer,
    *,
    logits: list[torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import psutil

    enough = psutil.swap_memory()._replace(free=1 << 30)
    monkeypatch.setattr(psutil, "swap_memory", lambda: enough)
    folder = checkpoint("Qwen3Moe")
    file = str(packed(folder, tmp_path / "a.experts"))
    with load(folder, "cpu", memory={"backing": backing, "expert_file": file, "residency": 0.25}) as engine:
        completion = engine.generate(PROMPT[0].tolist(), max_tokens=NUM_TOKENS, ignore_eos=True)
    assert_same_answer(completion.token_ids, logits, answer("Qwen3Moe", "cpu"), device="cpu")


def test_nothing_is_planned_for_quantising(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = checkpoint("Qwen3Moe")
    file = str(packed(folder, tmp_path / "a.experts", "int8"))
    settings: dict[str, Any] = {"device": "cpu", "model": {"path": str(folder), "experts": "int8"}}
    names = {row.name for row in plan_for(load_config(settings)).memory.rows}
    from_file = {
        row.name for row in plan_for(load_config({**settings, "memory": {"expert_file": file}})).memory.rows
    }
    assert names - from_file == {"quantising"}


def test_what_does_not_fit_is_refused_before_loading(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = checkpoint("Qwen3Moe")
    file = packed(folder, tmp_path / "a.experts", "int8")
    with pytest.raises(
        ConfigError, match=r"packed with model.experts: int8, and here it is checkpoint; write"
    ):
        load(folder, "cpu", memory={"expert_file": str(file)})
    with pytest.raises(
        ConfigError, match=r"memory\.expert_file: .*none\.experts: .*does not exist; write it once"
    ):
        load(folder, "cpu", memory={"expert_file": str(tmp_path / "none.experts")})
    with pytest.raises(CheckpointError, match=r"it was packed from another model"):
        load(checkpoint("GptOss"), "cpu", memory={"expert_file": str(file)}, model={"experts": "int8"})


def test_a_damaged_record_is_named(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = checkpoint("Qwen3Moe")
    file = packed(folder, tmp_path / "a.experts")
    flip(file, read_expert_header(file).map().records.offset + 100_000)
    with pytest.raises(CheckpointError, match=r"a\.experts: record \d+, at byte \d+, is damaged"):
        load(folder, "cpu", memory={"expert_file": str(file)})


def test_a_stale_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    folder = build_checkpoint("Olmoe", tmp_path / "model")
    file = packed(folder, tmp_path / "a.experts")
    shutil.rmtree(folder)
    folder.mkdir()
    build_checkpoint("Olmoe", folder, seed=1)
    with pytest.raises(
        CheckpointError, match=r"a\.experts: is stale: model\.safetensors of .* changed since"
    ):
        load(folder, "cpu", memory={"expert_file": str(file)})


def test_a_configuration_that_reads_the_file_may_pack_it(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder, file = checkpoint("Qwen3Moe"), tmp_path / "a.experts"
    settings = {
        "model": {"path": str(folder)},
        "memory": {"backing": "direct", "expert_file": str(file), "slabs": 4},
    }
    pack(decide(for_packing(load_config(settings))).config, file)
    with Engine.load({**settings, "device": "cpu", "execution": {"max_length": 256}}) as engine:
        assert len(say(engine)) == NUM_TOKENS
