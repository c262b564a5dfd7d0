"""The predictor's bench on a tiny predictor: its rows, and that it knows its own trace."""

from __future__ import annotations

import numpy as np
import pytest

from bench.predictor_bundled import cost_rows, recall_rows, shuffled
from hetero_runtime.prediction import RouterFingerprint, StoredPredictor
from hetero_runtime.trace.file import TraceInfo
from hetero_scheduler.predict.mamba2_block import Mamba2Sizes
from hetero_scheduler.predict.mamba2_model import GroupModel, GroupShape
from hetero_scheduler.trace import Trace

INFO = TraceInfo(
    model="tiny",
    architecture="Tiny",
    config_sha256="ab" * 32,
    dtype="float32",
    decoding="teacher-forced",
    temperature=0.0,
    seed=None,
    max_tokens=0,
    cut=None,
    tool_version="0",
)


def make_trace(documents: int = 10) -> Trace:
    logits = np.random.default_rng(0).normal(size=(documents * 12, 2, 6)).astype(np.float16)
    topk = np.argsort(-logits, axis=-1)[..., :2]
    tokens = np.arange(documents * 12, dtype=np.int32)
    return Trace(logits, topk, tokens, np.arange(documents + 1) * 12)


def stored_for(trace: Trace) -> StoredPredictor:
    shape = GroupShape(1, 6, 2, sizes=Mamba2Sizes(d_model=16, state_size=8, head_dim=8))
    notes = {"trace": {"num_tokens": trace.num_tokens}, "training": {"seed": 0}}
    return StoredPredictor(
        (GroupModel(shape), GroupModel(shape)), RouterFingerprint(2, 6, 2, "ab" * 32), notes, None
    )


def test_rows() -> None:
    trace = make_trace()
    stored = stored_for(trace)
    rows = {row.id: row for row in recall_rows(stored, trace, INFO) + cost_rows(stored, trace)}
    assert rows["predict.bundled_recall_k"].value <= rows["predict.bundled_recall_2k"].value
    assert "first-order" in (rows["predict.bundled_recall_k3_8"].reference or "")
    assert "teacher-forced held-out text, 1 test documents" in rows["predict.bundled_recall_k"].note
    assert rows["predict.bundled_step_ms"].value > 0
    assert rows["predict.bundled_bytes"].value % 4 == 0


def test_a_predictor_of_another_trace_is_refused() -> None:
    with pytest.raises(ValueError, match="trained on 120 tokens, this trace has 60"):
        recall_rows(stored_for(make_trace()), make_trace(5), INFO)


def test_shuffling_keeps_each_documents_steps() -> None:
    trace = make_trace(3)
    mixed = shuffled(trace)
    for first, last in zip(trace.bounds[:-1], trace.bounds[1:], strict=True):
        assert sorted(mixed.tokens[first:last]) == list(trace.tokens[first:last])
        assert list(mixed.tokens[first:last]) != list(trace.tokens[first:last])
