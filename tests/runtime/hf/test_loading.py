"""What loading the backbone asks of the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import modeling_utils

from hetero_runtime import Engine
from hetero_runtime.hf import loading
from tests.architectures import build_checkpoint


def test_transformers_reserves_no_memory_for_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    load = modeling_utils.PreTrainedModel._load_pretrained_model

    def watched(*arguments: Any) -> Any:
        asked.append(modeling_utils.caching_allocator_warmup is loading._WARM_UP)
        return load(*arguments)

    monkeypatch.setattr(modeling_utils.PreTrainedModel, "_load_pretrained_model", staticmethod(watched))
    with Engine.load(build_checkpoint("Qwen3Moe", tmp_path), device="cpu"):
        assert asked == [False]
        assert modeling_utils.caching_allocator_warmup is loading._WARM_UP


@pytest.mark.gpu
def test_loading_peaks_at_what_is_kept(tmp_path: Path) -> None:
    folder = build_checkpoint("Qwen3Moe", tmp_path)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with Engine.load(folder, device="cuda", memory={"slabs": 4}, execution={"mode": "eager"}) as engine:
        kept = torch.cuda.memory_allocated() - before
        peak = torch.cuda.max_memory_allocated() - before
        assert peak - kept < engine.stats().bank_bytes // 2, f"{peak} bytes at the peak, {kept} are kept"
