"""What is written is read; what is no whole trace is refused with the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from hetero_runtime.errors import CheckpointError, DeviceError
from hetero_runtime.trace import RoutingFacts, read_trace, write_trace
from hetero_scheduler.trace import Trace
from tests.runtime.trace.info import INFO


def make_trace(num_tokens: int = 6, num_experts: int = 8) -> Trace:
    draw = np.random.default_rng(0)
    logits = draw.normal(size=(num_tokens, 2, num_experts)).astype(np.float16)
    return Trace(
        logits=logits,
        topk=np.argsort(logits, axis=-1)[..., :2],
        tokens=np.arange(num_tokens, dtype=np.int32),
        bounds=np.array([0, 4, num_tokens]),
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.safetensors"
    write_trace(path, make_trace(), INFO)
    return path


@pytest.mark.parametrize(("num_experts", "dtype"), [(8, np.int16), (40_000, np.int32)])
def test_round_trip(num_experts: int, dtype: type, tmp_path: Path) -> None:
    path, trace = tmp_path / "trace.safetensors", make_trace(num_experts=num_experts)
    write_trace(path, trace, INFO)
    again, info = read_trace(path)
    assert info == INFO
    assert again.topk.dtype == dtype
    for field in ("logits", "topk", "tokens", "bounds"):
        assert np.array_equal(getattr(again, field), getattr(trace, field))
    assert [each.name for each in tmp_path.iterdir()] == ["trace.safetensors"]


def test_others_may_read_it_as_any_new_file(file: Path) -> None:
    plain = file.with_name("plain")
    plain.touch()
    assert file.stat().st_mode == plain.stat().st_mode


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_truncated_file_is_refused(share: float, file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    with pytest.raises(CheckpointError, match=r"truncated|not a safetensors"):
        read_trace(file)


def rewrite(file: Path, *, metadata: dict[str, str] | None = None, **tensors: Any) -> None:
    """The same file with parts replaced; None takes a tensor out."""
    with safe_open(file, "numpy") as opened:
        kept = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
        said = opened.metadata() if metadata is None else metadata
    kept |= tensors
    save_file({name: value for name, value in kept.items() if value is not None}, file, metadata=said)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk": None}, "no tensor 'topk'"),
        ({"logits": np.zeros((6, 2, 8), dtype=np.float32)}, r"'logits' is F32\[6, 2, 8\]"),
        ({"tokens": np.zeros((6, 1), dtype=np.int32)}, "'tokens' is"),
        ({"tokens": np.zeros(5, dtype=np.int32)}, "do not fit together"),
        ({"bounds": np.zeros(0, dtype=np.int64)}, "do not fit together"),
        ({"logits": np.zeros((6, 2, 9), dtype=np.float16)}, "num_experts=8, the tensors hold 9"),
        ({"metadata": {}}, "format is None"),
        ({"metadata": {"format": "hetero_runtime.trace/1"}}, "no JSON object"),
        ({"metadata": {"format": "hetero_runtime.trace/1", "trace": "{}"}}, "has no model, architecture"),
        ({"metadata": {"format": "hetero_runtime.trace/2"}}, "this version reads"),
    ],
)
def test_a_foreign_file_is_refused_with_the_field(changes: dict[str, Any], message: str, file: Path) -> None:
    rewrite(file, **changes)
    with pytest.raises(CheckpointError, match=message):
        read_trace(file)


def test_a_missing_file_and_an_unwritable_place(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_trace(tmp_path / "none.safetensors")
    with pytest.raises(DeviceError, match="cannot be written"):
        write_trace(tmp_path / "nowhere" / "trace.safetensors", make_trace(), INFO)


def test_facts_know_documents_and_chance() -> None:
    stays = np.tile(np.array([[[0, 1]], [[0, 1]], [[2, 3]], [[2, 3]]]), (2, 1, 1))  # [8, 1, 2]
    trace = Trace(
        logits=np.zeros((8, 1, 4), dtype=np.float16),
        topk=stays,
        tokens=np.zeros(8, dtype=np.int32),
        bounds=np.array([0, 2, 4, 6, 8]),
    )
    facts = RoutingFacts.of(trace)
    assert facts.persistence == 1.0
    assert facts.by_chance == pytest.approx(0.5)
    assert facts.load_entropy == pytest.approx(1.0)
    one_document = Trace(trace.logits, trace.topk, trace.tokens, np.array([0, 8]))
    assert RoutingFacts.of(one_document).persistence == pytest.approx(4 / 7)
