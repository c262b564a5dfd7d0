"""What loading the backbone asks of the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers import modeling_utils
from transformers.utils import logging

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


@pytest.mark.parametrize(("has_bars", "hub_has_bars"), [(True, True), (True, False), (False, False)])
def test_loading_draws_no_bar_and_leaves_them_as_they_were(
    has_bars: bool, hub_has_bars: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = build_checkpoint("Qwen3Moe", tmp_path)
    before = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    try:
        _set_bars(has_bars, hub_has_bars)
        capfd.readouterr()
        Engine.load(folder, device="cpu").close()
        assert "Loading" not in "".join(capfd.readouterr())
        assert (logging.is_progress_bar_enabled(), not are_progress_bars_disabled()) == (
            has_bars,
            hub_has_bars,
        )
    finally:
        _set_bars(*before)


def _set_bars(ours: bool, hubs: bool) -> None:
    (logging.enable_progress_bar if ours else logging.disable_progress_bar)()
    (enable_progress_bars if hubs else disable_progress_bars)()


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
