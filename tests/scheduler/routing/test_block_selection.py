"""The set of a block: by hand, against the plain reference, and what must hold for any block."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_scheduler.routing import Shape, block_reference
from hetero_scheduler.routing.block_selection import BlockPool, BlockSelection, shares_of
from hetero_scheduler.routing.commitment import CommitmentRates, confidence_weights

NUM_EXPERTS, TOP_K = 12, 3
SHAPE = Shape(2, NUM_EXPERTS, TOP_K)


def top_k(scores: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """The router's own choice, from the best on."""
    return np.argsort(-scores, axis=1, kind="stable")[:, :TOP_K]


def block(*wanted: list[int]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Scores of positions that want the experts named, the first one most; and their choices."""
    scores = np.full((len(wanted), NUM_EXPERTS), -4.0, np.float32)
    for position, experts in enumerate(wanted):
        scores[position, experts] = 3.0 - np.arange(len(experts))
    return scores, top_k(scores)


def decide(*wanted: list[int], weights: list[float], resident: list[int], **policy: float) -> list[set[int]]:
    """What positions execute with those `resident`."""
    pool = BlockPool(BlockSelection(**policy), SHAPE, capacity=NUM_EXPERTS)
    if resident:
        pool.read(0, np.array([resident]))
    decisions = pool.select(0, *block(*wanted), np.array(weights))
    return [set(row) for row in decisions.experts.tolist()]


def test_the_root_executes_its_own_choice() -> None:
    executed = decide([0, 1, 2], [3, 4, 5], weights=[1.0, 0.2], resident=[], growth=0, rescue=2)
    assert executed == [{0, 1, 2}, {0, 1, 2}], "nothing else is eligible, so the draft runs on it too"


def test_agreement_makes_the_set_small() -> None:
    """Two effective experts beyond the root's are wanted, in equal parts: two are eligible."""
    wanted = [[0, 1, 2], [0, 1, 3], [0, 1, 4]]
    executed = decide(*wanted, weights=[1.0, 1.0, 1.0], resident=[], growth=1.0, rerouting=0.0)
    assert executed == [{0, 1, 2}, {0, 1, 3}, {0, 1, 4}]
    executed = decide(*wanted, weights=[1.0, 1.0, 0.01], resident=[], growth=1.0, rerouting=0.0)
    assert executed[1] == {0, 1, 3}, "what is hardly wanted hardly counts"
    assert len(set().union(*executed)) == 5, "but e to the entropy is rounded up"
    executed = decide(*wanted, weights=[1.0, 1.0, 0.01], resident=[], growth=0.9, rerouting=0.0, rescue=2)
    assert set().union(*executed) == {0, 1, 2, 3}


def test_absent_experts_are_left_out_within_the_budget() -> None:
    wanted = [[0, 1, 2], [3, 4, 5]]
    options: dict[str, Any] = {"weights": [1.0, 1.0], "growth": 9.0, "rescue": 2.0}
    shares = shares_of(block(*wanted)[0])[1]
    least = float(shares[5] / (2 * shares[[3, 4, 5]].sum()))  # of all that both positions want
    assert decide(*wanted, resident=[0, 1, 2], rerouting=least * 0.99, **options)[1] == {3, 4, 5}
    assert decide(*wanted, resident=[0, 1, 2], rerouting=least * 1.01, **options)[1] == {3, 4, 0}
    assert decide(*wanted, resident=[3, 4, 5], rerouting=least * 1.01, **options)[1] == {3, 4, 5}
    assert decide(*wanted, resident=[0, 1, 2], rerouting=1.0, **options) == [{0, 1, 2}, {0, 1, 2}]


def test_likely_positions_keep_their_best_expert() -> None:
    wanted = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    executed = decide(*wanted, weights=[1.0, 0.3, 0.29], resident=[], growth=0.0, rescue=0.3)
    assert executed == [{0, 1, 2}, {3, 0, 1}, {0, 1, 2}]


def test_an_excluded_expert_is_nobodys() -> None:
    """A router that limits groups: what it excludes at a position is not executed there."""
    scores, own = block([0, 1, 2], [3, 4, 5])
    scores[1, [0, 1]] = -math.inf
    pool = BlockPool(BlockSelection(growth=0.0, rescue=2.0), SHAPE, capacity=NUM_EXPERTS)
    executed = pool.select(0, scores, own, np.array([1.0, 0.5])).experts
    assert executed[1].tolist() == [3, 4, 2], "two of its own stand in for the two it excludes"


def test_the_pool_holds_what_ran_last() -> None:
    pool = BlockPool(BlockSelection(), SHAPE, capacity=4)
    assert not pool.residents(0).any()
    pool.read(0, np.array([[0, 1, 2], [3, 4, 5], [0, 1, 6]]))
    assert np.flatnonzero(pool.residents(0)).tolist() == [0, 1, 3, 6], "ties to the lowest index"
    decisions = pool.select(0, *block([0, 7, 8]), np.ones(1))
    assert decisions.experts.tolist() == [[0, 7, 8]]
    assert (decisions.demanded, decisions.deviating) == (2, 0)
    assert np.flatnonzero(pool.residents(0)).tolist() == [0, 1, 7, 8]
    assert not pool.residents(1).any()


@st.composite
def blocks(draw: st.DrawFn) -> dict[str, Any]:
    """Any block: scores with ties, some experts excluded, any weights, pool and policy."""
    num_positions = draw(st.integers(1, 5))
    values = st.integers(-6, 6).map(lambda value: value / 2)
    scores = np.array(
        draw(st.lists(values, min_size=num_positions * NUM_EXPERTS, max_size=num_positions * NUM_EXPERTS)),
        np.float32,
    ).reshape(num_positions, NUM_EXPERTS)
    own = top_k(scores)
    for position in range(num_positions):
        for expert in draw(st.sets(st.integers(0, NUM_EXPERTS - 1), max_size=6)):
            if expert not in own[position]:
                scores[position, expert] = -math.inf
    weights = draw(st.lists(st.floats(0, 1), min_size=num_positions - 1, max_size=num_positions - 1))
    return {
        "scores": scores,
        "own": own,
        "weights": [1.0, *weights],
        "resident": draw(st.sets(st.integers(0, NUM_EXPERTS - 1), max_size=NUM_EXPERTS)),
        "policy": BlockSelection(
            growth=draw(st.sampled_from([0.0, 0.5, 1.0, 1.05, 3.0])),
            rerouting=draw(st.sampled_from([0.0, 0.05, 0.3, 1.0])),
            rescue=draw(st.sampled_from([0.0, 0.3, 2.0])),
        ),
    }


@given(blocks())
@settings(max_examples=400, deadline=None)
def test_compiled_decisions_are_the_references(given_block: dict[str, Any]) -> None:
    scores, own, weights = (given_block[name] for name in ("scores", "own", "weights"))
    policy, resident = given_block["policy"], given_block["resident"]
    pool = BlockPool(policy, SHAPE, capacity=NUM_EXPERTS)
    for expert in sorted(resident):
        pool.read(0, np.array([[expert]]))
    decisions = pool.select(0, scores, own, np.array(weights))
    shares = shares_of(scores)
    expected = block_reference.select(
        policy, scores, shares, own.tolist(), weights=weights, resident=resident
    )
    assert decisions.experts.tolist() == expected
    assert decisions.experts[0].tolist() == own[0].tolist(), "the root is committed for certain"
    assert all(len(set(row)) == TOP_K for row in expected)
    used = set().union(*map(set, expected))
    assert decisions.demanded == len(used - resident)
    assert decisions.deviating == sum(
        len(set(e) - set(o)) for e, o in zip(expected, own.tolist(), strict=True)
    )


def test_a_budget_of_all_and_no_rescue_copies_no_more_than_the_root_needs() -> None:
    scores = np.random.default_rng(0).normal(size=(6, NUM_EXPERTS)).astype(np.float32)
    pool = BlockPool(BlockSelection(rerouting=1.0, rescue=2.0), SHAPE, capacity=NUM_EXPERTS)
    pool.read(0, np.array([[0, 1, 2]]))
    decisions = pool.select(0, scores, top_k(scores), np.ones(6))
    assert decisions.demanded == len(set(top_k(scores)[0].tolist()) - {0, 1, 2})


def test_weights_by_position_and_by_confidence() -> None:
    rates = CommitmentRates(3)
    assert rates.weights(2).tolist() == [1, 1, 1]
    rates.observe(3, 1)
    rates.observe(2, 2)
    rates.observe(1, 0)
    assert rates.weights(3) == pytest.approx(np.sqrt([1, 3 / 4, 2 / 3, 1 / 2]))
    assert confidence_weights([0.81, 0.25]) == pytest.approx([1, 0.9, 0.45])


@pytest.mark.parametrize("field", ["growth", "rerouting", "rescue"])
def test_values_that_mean_nothing(field: str) -> None:
    for value in (-0.1, math.inf, math.nan):
        with pytest.raises(ValueError, match=field):
            BlockSelection(**{field: value})
    with pytest.raises(ValueError, match="capacity is 2"):
        BlockPool(BlockSelection(), SHAPE, capacity=2)
