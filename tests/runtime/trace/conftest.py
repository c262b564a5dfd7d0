"""Tiny models, and a recording of them with as few slabs as they run with."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hetero_runtime.config import ResolvedConfig, load_config
from hetero_runtime.planned import plan_for
from hetero_runtime.trace.recorder import Recorded, TraceSettings, record_trace
from tests.architectures import build_checkpoint

TEXTS = ("The river froze in 1865.", "def add(a, b):\n    return a + b", "It is good to share.")

MakeConfig = Callable[..., ResolvedConfig]
Record = Callable[..., Recorded]


@pytest.fixture(scope="session")
def config_of(tmp_path_factory: pytest.TempPathFactory) -> MakeConfig:
    """`config_of(name)`: the tiny model with a quarter of its experts resident, on the CPU."""

    @cache
    def build(name: str) -> ResolvedConfig:
        folder = build_checkpoint(name, tmp_path_factory.mktemp(name))
        memory = {"residency": 0.25}
        execution = {"max_length": 128}
        return plan_for(
            load_config(
                {"model": {"path": str(folder)}, "device": "cpu", "memory": memory, "execution": execution}
            )
        ).config

    return build


@pytest.fixture
def record(config_of: MakeConfig, tmp_path: Path) -> Record:
    """`record(name, texts, watch=..., max_tokens=...)`: into `tmp_path / "out.safetensors"`."""

    def run(
        name: str = "Qwen3Moe", texts: tuple[str, ...] = TEXTS, watch: Any = None, **settings: Any
    ) -> Recorded:
        chosen = TraceSettings(**{"max_tokens": 6, **settings})
        return record_trace(
            config_of(name), texts, tmp_path / "out.safetensors", settings=chosen, watch=watch
        )

    return run
