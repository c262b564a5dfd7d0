"""A batched full forward says of each row what plain transformers says of it alone, token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hetero_runtime.errors import RequestError
from hetero_runtime.evaluation.harness import Harness
from hetero_runtime.hf.forward import SequenceState
from hetero_runtime.hf.reference import load_reference
from tests.architectures import prompt_ids
from tests.runtime.evaluation.conftest import PartsOf

ROWS = [tuple(prompt_ids(n, seed=n).flatten().tolist()) for n in (9, 2, 14, 5)]
NAMES = ("Olmoe", "Qwen3Next", "DeepseekV3", "GptOss", "Qwen3VLMoe")
"""Each pads differently: plain attention, linear attention, latent attention, a short window with sinks, and
positions in three dimensions."""


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_a_batch_are_scored_as_each_alone_by_plain_transformers(name: str, parts_of: PartsOf) -> None:
    parts = parts_of(name)
    scores = Harness(parts, rows_at_once=4).score(ROWS)
    plain = load_reference(
        parts.config.model.path, dtype=parts.config.model.dtype, device=torch.device("cpu")
    )
    for row, score in zip(ROWS, scores, strict=True):
        state, expected = SequenceState(plain), []
        logits = [state.extend(torch.tensor([token])) for token in row[:-1]]
        for said, following in zip(logits, row[1:], strict=True):
            expected.append(-float(torch.log_softmax(said, -1)[following]))
        assert score.nats == pytest.approx(expected, rel=1e-4)
        likeliest = [int(said.argmax()) for said in logits]
        assert np.array_equal(score.is_greedy, np.array(likeliest) == np.array(row[1:]))
    parts.orchestrator.check()


def test_what_is_greedy_is_said_so(parts_of: PartsOf) -> None:
    parts = parts_of("Qwen3Moe")
    ids = list(ROWS[0])
    with torch.inference_mode():
        for _ in range(3):
            ids.append(int(SequenceState(parts.model).extend(torch.tensor(ids)).argmax()))
    assert Harness(parts).score([tuple(ids)])[0].is_greedy[-3:].tolist() == [True] * 3
    ids[-1] = (ids[-1] + 1) % 200
    assert Harness(parts).score([tuple(ids)])[0].is_greedy[-3:].tolist() == [True, True, False]


@pytest.mark.parametrize("rows_at_once", [1, 2, 3])
def test_the_size_of_a_pass_changes_nothing(rows_at_once: int, parts_of: PartsOf) -> None:
    parts = parts_of("Qwen3Moe")
    together = Harness(parts, rows_at_once=16).score(ROWS)
    apart = Harness(parts, rows_at_once=rows_at_once).score(ROWS)
    for a, b in zip(together, apart, strict=True):
        assert a.nats == pytest.approx(b.nats, abs=1e-5)


def test_logits_that_are_too_many_for_one_pass_are_made_by_several(
    parts_of: PartsOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = parts_of("Qwen3Moe")
    passes: list[int] = []
    monkeypatch.setattr("hetero_runtime.evaluation.harness._LOGITS_AT_ONCE", 264 * 14)
    harness = Harness(parts)
    score_batch = harness._score_batch
    monkeypatch.setattr(harness, "_score_batch", lambda rows: passes.append(len(rows)) or score_batch(rows))
    harness.score(ROWS)
    assert passes == [1, 1, 2]  # 14 tokens; 9; 5 and 2 together


def test_tokens_are_counted_as_they_go(parts_of: PartsOf) -> None:
    told: list[tuple[int, int]] = []
    Harness(parts_of("Qwen3Moe"), rows_at_once=2).score(ROWS, seen=lambda *at: told.append(at))
    assert told == [(23, 30), (30, 30)]


@pytest.mark.parametrize("length", [1, 129])
def test_rows_of_no_prediction_and_over_the_context_are_refused(length: int, parts_of: PartsOf) -> None:
    with pytest.raises(RequestError, match=f"row 1 has {length} tokens"):
        Harness(parts_of("Qwen3Moe")).score([ROWS[0], (1,) * length])


def test_no_rows_at_once_are_refused(parts_of: PartsOf) -> None:
    with pytest.raises(RequestError, match="rows is 0"):
        Harness(parts_of("Qwen3Moe"), rows_at_once=0)


def test_unsound_logits_are_an_error(parts_of: PartsOf, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = parts_of("Qwen3Moe")
    monkeypatch.setattr(
        "hetero_runtime.evaluation.harness.forward_rows",
        lambda _model, ids: torch.full((*ids.shape, 264), float("nan")),
    )
    with pytest.raises(RequestError, match="NaN or infinite logits at token 1"):
        Harness(parts).score(ROWS[:1])
