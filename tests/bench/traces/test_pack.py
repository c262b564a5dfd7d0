"""Packing: the budget is used up, shares are kept, documents stay whole, and the folder reads as a cache."""

from __future__ import annotations

import lzma
from pathlib import Path

import numpy as np
import pytest

from bench.models.streams import Stream, load_streams
from bench.traces.pack import choose_tokens, pack, thin, write_folder


def stream(label: str, num_documents: int, *, is_held_out: bool = False, size: int = 9) -> Stream:
    """Documents of `size` tokens and an end, that nothing can compress much."""
    draw = np.random.default_rng(len(label))
    tokens = draw.integers(1, 6000, (num_documents, size + 1)).astype(np.uint16)
    tokens[:, -1] = 0
    return Stream(label, is_held_out, tokens.reshape(-1))


def test_all_is_kept_when_it_fits() -> None:
    assert choose_tokens([100, 50], [0.5, 0.5], [0.6, 0.6], 1000.0) == [100, 50]


def test_small_sources_go_whole_and_the_others_in_proportion() -> None:
    kept = choose_tokens([10, 1000, 1000], [0.5, 0.25, 0.25], [0.5, 0.5, 1.0], 155.0)
    assert kept[0] == 10
    assert kept[1] == kept[2] == pytest.approx(100, abs=1)
    assert 0.97 * 155 <= np.dot(kept, [0.5, 0.5, 1.0]) <= 155


def test_thinned_documents_are_whole_and_spaced_evenly() -> None:
    whole = stream("story.a", 100)
    kept = thin(whole, 250)
    documents = {tuple(row) for row in whole.tokens.reshape(100, 10).tolist()}
    rows = kept.tokens.reshape(-1, 10)
    assert len(rows) == 25
    assert all(tuple(row) in documents for row in rows.tolist())
    assert np.array_equal(rows, whole.tokens.reshape(100, 10)[3::4])
    assert np.array_equal(thin(whole, 10_000).tokens, whole.tokens)


def test_held_out_goes_whole_and_the_file_sizes_keep_to_the_budget(tmp_path: Path) -> None:
    streams = [stream("story.a", 4000), stream("code.b", 6000), stream("code.c", 60, is_held_out=True)]
    kept = pack(streams, 60_000)
    (tmp_path / "bpe.json").write_text((Path("hetero_runtime/bundled/model/tokenizer.json")).read_text())
    write_folder(kept, tmp_path / "bpe.json", tmp_path / "out")
    held = next(part for part in kept if part.is_held_out)
    assert np.array_equal(held.tokens, streams[2].tokens)
    size = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.xz"))
    assert 0.85 * 60_000 < size <= 60_000
    _, read = load_streams(tmp_path / "nowhere", tmp_path / "out", 0)
    assert {part.label: len(part.tokens) for part in read} == {part.label: len(part.tokens) for part in kept}


def test_only_the_kinds_asked_for_travel() -> None:
    streams = [stream("story.a", 9), stream("code.b", 9), stream("code.c", 9, is_held_out=True)]
    assert [part.label for part in pack(streams, 60_000, kinds=["story"])] == ["story.a"]


def test_too_small_a_budget_is_refused() -> None:
    held = stream("code.c", 1000, is_held_out=True)
    assert len(lzma.compress(held.tokens.tobytes())) > 1000
    with pytest.raises(ValueError, match="held-out streams alone"):
        pack([held, stream("story.a", 10)], 1000)
