"""A compact trace: choices exact, strengths nearly, and no more bytes than asked for."""

from __future__ import annotations

import dataclasses
import lzma
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.traces.compact import (
    STEPS,
    compress,
    decompress,
    first_documents,
    main,
    read_compact,
    trim,
)
from hetero_runtime.trace.file import TraceInfo, read_trace, write_trace
from hetero_scheduler.predict.activation import activation_state
from hetero_scheduler.predict.mamba2_training import _check_choices
from hetero_scheduler.predict.routing import chosen_experts
from hetero_scheduler.trace import Trace

INFO = TraceInfo(
    model="tiny",
    architecture="Tiny",
    config_sha256="ab" * 32,
    dtype="float32",
    decoding="sampled",
    temperature=0.8,
    seed=0,
    max_tokens=10,
    cut=2,
    tool_version="0",
)


def make_trace(*, documents: int = 12, experts: int = 128, top_k: int = 8) -> Trace:
    logits = np.random.default_rng(0).normal(size=(documents * 10, 3, experts)).astype(np.float16)
    topk = chosen_experts(logits, top_k).astype(np.int16)
    tokens = np.arange(documents * 10, dtype=np.int32)
    early = (logits + np.random.default_rng(1).normal(size=logits.shape)).astype(np.float16)
    early[:, 0] = 0
    return Trace(logits, topk, tokens, np.arange(documents + 1) * 10, early)


def shares_of(logits: np.ndarray) -> np.ndarray:
    return torch.softmax(torch.from_numpy(logits).float(), dim=-1).numpy()


@pytest.mark.parametrize(("experts", "top_k"), [(128, 8), (32, 4), (256, 1)])
def test_choices_come_back_exactly(experts: int, top_k: int) -> None:
    trace = make_trace(experts=experts, top_k=top_k)
    back, info = decompress(compress(trace, INFO))
    assert info == INFO
    assert np.array_equal(np.sort(back.topk), np.sort(trace.topk))
    assert np.array_equal(back.tokens, trace.tokens)
    assert np.array_equal(back.bounds, trace.bounds)
    assert back.num_experts == experts


def test_what_a_predictor_reads_comes_back_nearly() -> None:
    trace = make_trace()
    back, _ = decompress(compress(trace, INFO))
    states = [
        activation_state(torch.from_numpy(each.logits), torch.from_numpy(trace.topk.astype(np.int64)))
        for each in (trace, back)
    ]
    assert (states[0] - states[1]).abs().max() < 2 / STEPS * states[0].max()
    assert torch.equal(states[1] > 0, states[0] > 0)


def test_the_chosen_are_the_highest_logits() -> None:
    back, _ = decompress(compress(make_trace(), INFO))
    assert np.array_equal(np.sort(chosen_experts(back.logits, 8)), np.sort(back.topk))
    _check_choices(back)


@pytest.mark.parametrize(("experts", "top_k"), [(128, 8), (32, 4), (4, 2)])
def test_early_routers_are_kept_where_asked(experts: int, top_k: int) -> None:
    """The k + 3 best to half a step, the others alike, with the share that they had together."""
    trace = make_trace(experts=experts, top_k=top_k)
    assert trace.early is not None
    plain, _ = decompress(compress(trace, INFO))
    back, _ = decompress(compress(trace, INFO, keeps_early=True))
    assert plain.early is None
    assert back.early is not None
    assert np.array_equal(back.topk, plain.topk)
    assert np.array_equal(back.tokens, plain.tokens)
    said, kept = shares_of(trace.early), shares_of(back.early)
    count = min(top_k + 3, experts)
    is_best = said[:, 1:] > np.sort(said[:, 1:], axis=-1)[..., ::-1][..., count - 1 : count]  # ties may go
    np.testing.assert_allclose(kept[:, 1:][is_best], said[:, 1:][is_best], rtol=0.1)
    np.testing.assert_allclose((kept[:, 1:] * is_best).sum(-1), (said[:, 1:] * is_best).sum(-1), rtol=0.05)
    np.testing.assert_allclose(kept[:, 0], 1 / experts, rtol=1e-5)


def test_early_routers_that_were_not_recorded_cannot_be_kept() -> None:
    with pytest.raises(ValueError, match="does not hold what routers say"):
        compress(dataclasses.replace(make_trace(), early=None), INFO, keeps_early=True)


def test_trimming_drops_whole_documents_from_the_end() -> None:
    trace = make_trace(documents=40)
    whole = compress(trace, INFO)
    content = trim(trace, INFO, len(whole) // 3)
    back, _ = decompress(content)
    count = len(back.bounds) - 1
    assert 0.8 * len(whole) / 3 < len(content) <= len(whole) / 3
    assert np.array_equal(back.tokens, first_documents(trace, count).tokens)
    assert trim(trace, INFO, len(whole)) == whole


def test_a_budget_below_one_document_is_refused() -> None:
    with pytest.raises(ValueError, match="1 documents take"):
        trim(make_trace(), INFO, 100)


def test_what_does_not_fit_in_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="300 experts"):
        compress(make_trace(experts=300), INFO)
    with pytest.raises(ValueError, match="format is"):
        decompress(lzma.compress(b'{"format": "other"}\n'))


def test_command_keeps_a_trace_that_either_reader_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = make_trace()
    write_trace(tmp_path / "whole.safetensors", trace, INFO)
    main(
        [str(tmp_path / "whole.safetensors"), str(tmp_path / "small.trace.xz"), "--megabytes", "1", "--early"]
    )
    assert "120 of 120 tokens, 12 documents" in capsys.readouterr().out
    for name in ("whole.safetensors", "small.trace.xz"):
        read, _ = read_compact(tmp_path / name)
        assert np.array_equal(np.sort(read.topk), np.sort(trace.topk))
        assert read.early is not None
    main([str(tmp_path / "small.trace.xz"), str(tmp_path / "again.safetensors")])
    again, info = read_trace(tmp_path / "again.safetensors")
    assert info == INFO
    assert np.array_equal(again.bounds, trace.bounds)
    assert not list(tmp_path.glob("*.unfinished"))
