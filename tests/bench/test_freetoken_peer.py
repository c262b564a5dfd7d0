"""FreeToken is measured by our measure: same prompts, tokens and recorded experts (with a stand-in here)."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench import freetoken_peer
from bench.decode_case import case_parser


class StandInLLM:
    """Answers at once, and counts what decode needed as FreeToken does."""

    calls: list[tuple[int, int]]

    def __init__(self, _path: str, **options: Any) -> None:
        self.options, self.calls = options, []
        self.num_decoded = 0
        stats = self._stats
        cache = types.SimpleNamespace(cache_size=14, decode_miss_stats=stats)
        self.engine = types.SimpleNamespace(moe_offload_cache=cache if "moe_cache_rate" in options else None)

    def _stats(self) -> dict[str, float]:
        return {"active_per_layer": 2.0, "layer_calls": float(self.num_decoded), "miss_rate": 0.25}

    def generate(self, prompts: list[list[int]], params: argparse.Namespace) -> list[dict[str, list[int]]]:
        self.calls.append((len(prompts[0]), params.max_tokens))
        self.num_decoded += params.max_tokens - 1
        return [{"token_ids": [0] * params.max_tokens}]


@pytest.fixture
def stock_choice(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """FreeToken's modules, as far as they are used; the one that chooses experts is returned."""
    moe = types.SimpleNamespace(fused_topk=lambda **_: (torch.ones(3, 2), torch.zeros(3, 2)))
    modules = {
        "freetoken": types.SimpleNamespace(),
        "freetoken.llm": types.SimpleNamespace(LLM=StandInLLM),
        "freetoken.core": types.SimpleNamespace(SamplingParams=argparse.Namespace),
        "freetoken.layers": types.SimpleNamespace(moe=moe),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**30)
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "0.1.3")
    return moe


def test_measured_as_ours_is(
    checkpoint: Path,
    routing: Path,
    stock_choice: types.SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peers: list[Any] = []
    make = freetoken_peer.Peer

    def kept(*arguments: Any, **named: Any) -> freetoken_peer.Peer:
        peers.append(make(*arguments, **named))
        return peers[-1]

    monkeypatch.setattr(freetoken_peer, "Peer", kept)
    words = [str(checkpoint), "--residency", "0.45", "--routing", str(routing), "--tokens", "8"]
    options = case_parser("").parse_args([*words, "--prompts", "5", "40", "--runs", "2"])
    stock = stock_choice.fused_topk
    figures = freetoken_peer.measure(options)
    assert stock_choice.fused_topk is not stock, "the recording is not replayed"
    assert peers[0].llm.options["moe_cache_rate"] == 0.45
    assert peers[0].llm.calls == [
        (16, 32),  # warm-up
        *[(16, 1)] * 2,
        *[(16, 9)] * 2,
        *[(5, 1)] * 3,
        *[(40, 1)] * 3,
    ]
    assert figures.engine == "FreeToken 0.1.3"
    assert figures.hit_rate == pytest.approx(0.75)
    assert (figures.slots, figures.peak_vram_gib, set(figures.ttfts_ms)) == (14, 1.0, {5, 40})


def test_all_resident_has_neither_cache_nor_recording(
    checkpoint: Path, stock_choice: types.SimpleNamespace
) -> None:
    stock = stock_choice.fused_topk
    options = case_parser("").parse_args(
        [str(checkpoint), "--residency", "1", "--tokens", "4", "--runs", "1"]
    )
    figures = freetoken_peer.measure(options)
    assert stock_choice.fused_topk is stock
    assert (figures.hit_rate, figures.slots, figures.ttfts_ms) == (None, 0, {})


def test_recorded_experts_come_layer_by_layer(stock_choice: types.SimpleNamespace) -> None:
    recorded = np.arange(5 * 2 * 2).reshape(5, 2, 2)  # [tokens, layers, top_k]
    freetoken_peer.replay_in_freetoken(recorded, num_layers=2, device="cpu")
    for layer in range(2):
        weights, ids = stock_choice.fused_topk(anything=1)
        assert ids.tolist() == recorded[:3, layer].tolist()
        assert ids.dtype == torch.int32
        assert weights.tolist() == torch.ones(3, 2).tolist()
    assert stock_choice.fused_topk()[1].tolist() == recorded[[3, 4, 0], 0].tolist()
