"""The rows of all horizons, on a routing that the token decides and early routers say outright."""

from __future__ import annotations

import numpy as np

from bench.horizons_bundled import HORIZONS, hit_rows, recall_rows
from hetero_runtime.prediction import RouterFingerprint, StoredPredictor
from hetero_scheduler.trace import Trace
from tests.bench.test_predictor_bundled import INFO
from tests.runtime.foresight.predictors import random_models, random_refinement

LAYERS, EXPERTS, TOP_K = 2, 12, 2


def test_rows() -> None:
    logits = np.random.default_rng(0).normal(size=(120, LAYERS, EXPERTS)).astype(np.float16)
    topk = np.argsort(-logits, axis=-1, kind="stable")[..., :TOP_K].astype(np.int16)
    tokens, bounds = np.arange(120, dtype=np.int32) % 40, np.arange(7) * 20
    trace = Trace(logits, topk, tokens, bounds, early=logits)
    stored = StoredPredictor(
        tuple(random_models(LAYERS, EXPERTS, TOP_K)),
        RouterFingerprint(LAYERS, EXPERTS, TOP_K, "ab" * 32),
        {},
        random_refinement(LAYERS, EXPERTS),
    )
    recall = {row.id: row.value for row in recall_rows(stored, trace)}
    step, token, layer = (recall[f"predict.bundled_horizon_{name}_recall_k3"] for name in HORIZONS)
    assert layer > max(step, token)
    hits = {row.id: row for row in hit_rows(stored, trace, INFO)}
    assert len(hits) == 2 * len(HORIZONS)
    for row in hits.values():
        assert 0 < row.value < 100
        assert "for nothing" in row.note
        assert "load entropy" in row.note
