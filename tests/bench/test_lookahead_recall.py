"""The bench of hot recall on a tiny model: its rows, with and without what images look like."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bench.lookahead_recall import NAMES, rows_for
from hetero_scheduler.predict.lookahead_training import LookaheadOptions
from tests.architectures import build_checkpoint


def test_rows_of_a_tiny_model(tmp_path: Path) -> None:
    folder = build_checkpoint("Qwen3VLMoe", tmp_path / "model")
    rng = np.random.default_rng(0)
    pairs = [
        (Image.fromarray(rng.integers(0, 255, (64, 64, 3), dtype=np.uint8)), f"what is {n}?")
        for n in range(10)
    ]
    rows = rows_for(
        folder, pairs, options=LookaheadOptions(epochs=1, width=8), keep_ratio=0.5, prefix=1, device="cpu"
    )
    found = {row.id: row for row in rows}
    assert len(found) == len(rows)
    for name in NAMES:
        for kind in ("", "_prompt"):
            for suffix in ("", "_next", "_blind"):
                assert 0 <= found[f"vl.recall_{name}{kind}{suffix}"].value <= 1
        assert "frequency" in found[f"vl.recall_{name}"].reference
        assert found[f"vl.recall_{name}"].target is not None
        assert found[f"vl.recall_{name}_prompt"].target is None
    ratio = found["vl.recall_10_over_random"].value
    assert ratio == pytest.approx(found["vl.recall_10"].value / (2 / 16))
    assert found["vl.predict_ms"].value > 0
    assert "load entropy" in found["vl.recall_10"].note
