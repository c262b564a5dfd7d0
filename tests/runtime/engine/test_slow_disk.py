"""A disk that a control group holds to a few megabytes a second: the same tokens, deadlines that hold."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hetero_runtime.config import load_config
from hetero_runtime.engine import Engine
from hetero_runtime.expert_file.pack import pack
from hetero_runtime.planned import decide
from tests.runtime.engine.conftest import MakeCheckpoint
from tests.runtime.engine.rest import assert_at_rest, engine_threads
from tests.runtime.engine.serving import LONG, OPTIONS, PROMPTS
from tests.throttled_disk import throttled_disk

SLOW, SLOWER = 8_000_000, 500_000
"""Bytes a second."""


@pytest.fixture(scope="module")
def folder(checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its expert file beside it."""
    folder = tmp_path_factory.mktemp("slow") / "model"
    shutil.copytree(checkpoint("Qwen3Moe"), folder)
    config = decide(load_config({"model": {"path": str(folder)}, "device": "cpu"})).config
    pack(config, folder.with_name("model.experts.safetensors"))
    return folder


def test_a_throttled_disk_changes_no_token_and_fails_nothing(folder: Path) -> None:
    with Engine.load(folder, device="cpu", memory={"slabs": "all"}) as engine:
        expected = engine.generate(PROMPTS[0], **OPTIONS).token_ids
    with Engine.load(folder, device="cpu", memory={"backing": "direct", "residency": 0.5}) as engine:
        with throttled_disk(folder, SLOW) as disk:
            assert engine.generate(PROMPTS[0], **OPTIONS).token_ids == expected
            stats = engine.stats().disk
            assert disk.read_bytes() >= stats.num_bytes > 0, "it was this disk that was read"
        assert (stats.retries, stats.failures) == (0, 0)
        assert_at_rest(engine)
    assert engine_threads() == []


def test_a_deadline_holds_while_the_disk_crawls(folder: Path) -> None:
    with Engine.load(folder, device="cpu", memory={"backing": "direct", "residency": 0.25}) as engine:
        with throttled_disk(folder, SLOWER) as disk:
            cut = engine.generate(PROMPTS[0], timeout_s=0.5, **LONG)
            assert cut.finish_reason == "deadline"
            assert len(cut.token_ids) < LONG["max_tokens"]
            disk.set_rate(1 << 40)
            assert_at_rest(engine)
            whole = engine.generate(PROMPTS[0], **OPTIONS)
        assert whole.finish_reason == "length"
        assert whole.token_ids[: len(cut.token_ids)] == cut.token_ids[: len(whole.token_ids)]
