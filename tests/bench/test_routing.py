"""Recorded routing, laid over a larger geometry."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.routing import RecordedRouting, RoutingFacts, static_hit_rate


def _recorded(streams: int = 4, tokens: int = 50, layers: int = 3) -> RecordedRouting:
    """Top-4 of 64 at random, distinct within a token."""
    draw = np.random.default_rng(0)
    order = draw.random((streams, tokens, layers, 64)).argsort(-1)
    return RecordedRouting(order[..., :4], 64, "random")


def test_two_streams_make_one_block_of_layers() -> None:
    recorded = _recorded()
    laid = recorded.laid_over(layers=5, experts=128, top_k=8)
    assert laid.shape == (50, 5, 8)
    for layer, (first, second, source) in enumerate([(0, 1, 0), (0, 1, 1), (0, 1, 2), (2, 3, 0), (2, 3, 1)]):
        assert (laid[:, layer, :4] == recorded.experts[first, :, source]).all()
        assert (laid[:, layer, 4:] == 64 + recorded.experts[second, :, source]).all()


def test_experts_are_in_range_and_distinct_within_a_token() -> None:
    laid = _recorded().laid_over(layers=6, experts=128, top_k=8)
    assert laid.min() >= 0
    assert laid.max() < 128
    ordered = np.sort(laid, axis=-1)
    assert (ordered[..., 1:] != ordered[..., :-1]).all()


def test_recorded_geometry_itself_takes_one_stream() -> None:
    recorded = _recorded(streams=1)
    assert (recorded.laid_over(layers=3, experts=64, top_k=4) == recorded.experts[0]).all()


@pytest.mark.parametrize(
    ("layers", "experts", "top_k", "message"),
    [
        (3, 100, 8, "no multiple"),
        (3, 128, 4, "no multiple"),
        (7, 128, 8, "take 6 streams, 4 are recorded"),
    ],
)
def test_geometry_that_does_not_fit_is_refused(layers: int, experts: int, top_k: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _recorded().laid_over(layers=layers, experts=experts, top_k=top_k)


def test_file_reads_back(tmp_path: Path) -> None:
    recorded, path = _recorded(), tmp_path / "routing.safetensors"
    recorded.save(path)
    read = RecordedRouting.load(path)
    assert (read.experts == recorded.experts).all()
    assert (read.num_experts, read.source) == (64, "random")
    assert path.stat().st_size < recorded.experts.size + 1000


def test_facts_tell_even_routing_from_lopsided() -> None:
    tokens = np.arange(64)[:, None, None]
    even = (4 * tokens + np.arange(4)) % 64  # each expert equally often, none twice in a row
    facts = RoutingFacts.of(even, 64)
    assert facts.load_entropy == pytest.approx(1)
    assert facts.persistence == 0
    assert facts.by_chance == 4 / 64
    assert static_hit_rate(even, 64, 0.25) == pytest.approx(0.25)
    always = np.broadcast_to(np.arange(4), (64, 1, 4))
    facts = RoutingFacts.of(always, 64)
    assert facts.load_entropy == pytest.approx(np.log(4) / np.log(64))
    assert facts.persistence == 1
    assert static_hit_rate(always, 64, 0.25) == 1
