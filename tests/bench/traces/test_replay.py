"""A kept trace lies on a model of its own size, and on one of fewer layers, as it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.routing import RecordedRouting
from bench.traces.compact import compress, write_compact
from bench.traces.replay import main
from tests.bench.traces.test_compact import INFO, make_trace


def test_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = make_trace()
    write_compact(tmp_path / "small.trace.xz", compress(trace, INFO))
    main([str(tmp_path / "small.trace.xz"), str(tmp_path / "routing.safetensors")])
    assert "tiny, sampled at 0.8, 12 documents, 120 tokens: load entropy" in capsys.readouterr().out
    routing = RecordedRouting.load(tmp_path / "routing.safetensors")
    laid = routing.laid_over(layers=2, experts=128, top_k=8)
    assert np.array_equal(np.sort(laid), np.sort(trace.topk[:, :2]))
