"""Teaching predictors a routing that follows from its own past: they find it, shuffling takes it away."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from bench.harness import ResultFile
from bench.traces.learn import Lesson, horizon_rows, main, one_step_scores
from bench.traces.probe import TransformerProbe
from hetero_runtime.prediction import read_predictor
from hetero_runtime.trace import write_trace
from hetero_scheduler.predict.recall import Recall, find_origins
from hetero_scheduler.trace import Trace
from tests.bench.traces.test_compact import INFO

LAYERS, EXPERTS, TOP_K, STEPS = 2, 8, 2, 24


def clockwork(num_documents: int, seed: int) -> Trace:
    """Every document turns its experts by one a step, from a beginning of its own."""
    draw = np.random.default_rng(seed)
    start = np.repeat(draw.integers(0, EXPERTS, num_documents), STEPS)
    step = np.tile(np.arange(STEPS), num_documents)
    first = (start + step)[:, None] + np.arange(LAYERS)
    topk = np.stack([first % EXPERTS, (first + 3) % EXPERTS], axis=-1).astype(np.int16)
    logits = np.zeros((len(topk), LAYERS, EXPERTS), dtype=np.float16)
    np.put_along_axis(logits, topk.astype(np.int64), np.array([5, 4], dtype=np.float16), axis=-1)
    bounds = STEPS * np.arange(num_documents + 1)
    return Trace(logits, topk, np.zeros(len(topk), np.int32), bounds, early=logits)


def test_a_lesson_keeps_the_splits_apart() -> None:
    lesson = Lesson.of(clockwork(20, 0), clockwork(5, 1))
    assert lesson.trace.num_tokens == 25 * STEPS
    assert lesson.split.test.tolist() == list(range(20, 25))
    assert sorted([*lesson.split.train, *lesson.split.validation]) == list(range(20))
    assert len(lesson.split.validation) == 2


def test_a_probe_sees_the_past_alone() -> None:
    torch.manual_seed(0)
    probe = TransformerProbe.of(LAYERS, EXPERTS, TOP_K, width=32).eval()
    states = torch.rand(1, 6, LAYERS, EXPERTS)
    before, _ = probe(states, probe.initial_state(1))
    states[:, 4:] = torch.rand(1, 2, LAYERS, EXPERTS)
    after, _ = probe(states, probe.initial_state(1))
    torch.testing.assert_close(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4], after[:, 4])


def test_scores_are_taken_at_the_origins() -> None:
    torch.manual_seed(0)
    trace = clockwork(4, 0)
    probe = TransformerProbe.of(LAYERS, EXPERTS, TOP_K, width=32).eval()
    origins = find_origins(trace, np.array([1, 3]), stride=8)
    scores = one_step_scores([probe], trace, origins)
    assert scores.shape == (len(origins.tokens), LAYERS, EXPERTS)
    lesson = clockwork(4, 0)
    alone = Trace(
        lesson.logits[3 * STEPS :], lesson.topk[3 * STEPS :], lesson.tokens[3 * STEPS :], np.array([0, STEPS])
    )
    again = one_step_scores([probe], alone, find_origins(alone, np.array([0]), stride=8))
    np.testing.assert_allclose(scores[origins.documents == 3], again, atol=1e-5)


@pytest.mark.slow
def test_command_teaches_measures_and_keeps(tmp_path: Path) -> None:
    write_trace(tmp_path / "learning.safetensors", clockwork(60, 0), INFO)
    write_trace(tmp_path / "heldout.safetensors", clockwork(12, 1), INFO)
    out = tmp_path / "p.safetensors"
    words = f"--flavour matched --shape 48x128 --out {out} --results {tmp_path} --minutes 0.5 --width 32"
    main([str(tmp_path), *words.split(), "--device", "cpu", "--rate", "4e-3"])
    rows = {row.id: row for row in ResultFile.read(tmp_path / "predictors_48x128_matched.json").rows}
    assert rows["predict.recall_k"].value > 0.95
    assert rows["predict.recall_drop_8"].value < 5
    assert rows["predict.recall_k_shuffled"].value < 0.5
    assert rows["predict.recall_k3_of_probe"].target == ">=0.97"
    names = ("step", "token", "layer")
    step, token, layer = (rows[f"predict.horizon_{name}_recall_k3"].value for name in names)
    assert layer >= max(step, token) > 0.95
    stored = read_predictor(out)
    assert len(stored.models) == 2
    assert stored.refinement is not None
    assert stored.refinement.pool is not None


def test_rows_of_horizons_are_of_the_step_to_come() -> None:
    far, near = Recall("mamba2", 8, 0.1, 0.2, 0.3), Recall("mamba2", 1, 0.4, 0.5, 0.6)
    refined = [Recall("mamba2, token known", 1, 0.7, 0.8, 0.9)]
    rows = horizon_rows([far, near], refined, prefix="predict.")
    assert [(row.id, row.value) for row in rows] == [
        ("predict.horizon_step_recall_k3", 0.5),
        ("predict.horizon_token_recall_k3", 0.8),
    ]
