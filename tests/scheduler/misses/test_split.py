"""The split against all subsets; policies on imagined machines."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_scheduler.misses import (
    AllInPlace,
    ByCost,
    CostCurve,
    Costs,
    DeviceSide,
    FixedShare,
    LayerDemand,
    Verdict,
    split_by_cost,
)
from hetero_scheduler.misses.by_cost import PATIENCE

CALL_S = 1e-9
seconds = st.integers(0, 12).map(float)  # small numbers: ties are frequent


@st.composite
def layers(draw: st.DrawFn) -> tuple[list[float], list[float], list[float]]:
    """(in_place_s, device_s, worth) of up to eight misses."""
    n = draw(st.integers(0, 8))
    in_place_s = draw(st.lists(seconds, min_size=n, max_size=n))
    steps = draw(st.lists(seconds, min_size=n + 1, max_size=n + 1))
    worth = draw(st.permutations([float(rank) for rank in range(n)]))
    return in_place_s, list(itertools.accumulate(steps)), worth


def finish_s(in_place: tuple[int, ...], in_place_s: list[float], device_s: list[float]) -> float:
    return max(sum(in_place_s[i] for i in in_place), device_s[len(in_place_s) - len(in_place)])


def subsets(n: int) -> list[tuple[int, ...]]:
    return [chosen for k in range(n + 1) for chosen in itertools.combinations(range(n), k)]


@settings(max_examples=400, deadline=None)
@given(layers())
def test_no_subset_finishes_earlier(layer: tuple[list[float], list[float], list[float]]) -> None:
    in_place_s, device_s, worth = layer
    chosen = tuple(split_by_cost(in_place_s, device_s, worth, call_s=0.0))
    assert list(chosen) == sorted(set(chosen))
    best = min(finish_s(subset, in_place_s, device_s) for subset in subsets(len(worth)))
    assert finish_s(chosen, in_place_s, device_s) == best
    # and of those that finish as early, none leaves more to be loaded
    fewest = min(len(s) for s in subsets(len(worth)) if finish_s(s, in_place_s, device_s) == best)
    assert len(chosen) == fewest


@settings(max_examples=100, deadline=None)
@given(layers())
def test_of_equal_costs_the_least_worth_is_computed_in_place(
    layer: tuple[list[float], list[float], list[float]],
) -> None:
    in_place_s, device_s, worth = layer
    chosen = set(split_by_cost(in_place_s, device_s, worth, call_s=0.0))
    for i, j in itertools.permutations(range(len(worth)), 2):
        if i in chosen and j not in chosen and in_place_s[i] == in_place_s[j]:
            assert worth[i] < worth[j]


def test_link_and_cpu_finish_together() -> None:
    """Eight misses of one token, the CPU as fast as the link: four each, the least worth in place."""
    worth = [3, 7, 0, 5, 1, 6, 2, 4]
    chosen = split_by_cost([1.0] * 8, list(range(9)), worth, call_s=0.0)
    assert chosen == [0, 2, 4, 6]


@settings(max_examples=200, deadline=None)
@given(layers(), seconds)
def test_a_call_has_to_be_worth_what_it_costs(
    layer: tuple[list[float], list[float], list[float]], call_s: float
) -> None:
    in_place_s, device_s, worth = layer
    chosen = split_by_cost(in_place_s, device_s, worth, call_s=call_s)

    def finish(subset: tuple[int, ...]) -> float:
        return finish_s(subset, in_place_s, device_s) + (call_s if subset else 0)

    assert finish(tuple(chosen)) == min(map(finish, subsets(len(worth))))


# ---- costs


def test_a_curve_has_lines_between_what_was_measured_and_behind_it() -> None:
    curve = CostCurve({1: 2.0, 4: 2.0, 16: 5.0, 64: 29.0})
    assert curve.seconds([1, 2, 10, 16, 64, 66]) == [2, 2, 3.5, 5, 29, 30]


def test_a_curve_does_not_fall_and_needs_points() -> None:
    assert CostCurve({1: 3.0, 4: 2.0}).seconds([1, 4, 9]) == [2, 2, 2]
    assert CostCurve({4: 2.0}).seconds([1, 100]) == [2, 2]
    for wrong in ({}, {1: 0.0}, {0: 1.0}):
        with pytest.raises(ValueError, match="above zero"):
            CostCurve(wrong)


def make_costs(*, in_place_s: float, load_s: float, compute_s: float, overlaps: bool) -> Costs:
    return Costs(
        CostCurve({1: in_place_s}), DeviceSide(load_s, CostCurve({1: compute_s}), overlaps), call_s=CALL_S
    )


@pytest.mark.parametrize(
    ("overlaps", "expected"),
    [(False, [2.0, 13.0, 24.0, 35.0]), (True, [2.0, 10.0, 20.0, 30.0])],
    ids=["one after the other", "overlapping"],
)
def test_the_device_side(overlaps: bool, expected: list[float]) -> None:
    costs = make_costs(in_place_s=1.0, load_s=10.0, compute_s=1.0, overlaps=overlaps)
    assert costs.device_s([1] * 2, [1] * 3) == expected
    assert costs.load_s() == (10.0 if overlaps else 11.0)


def test_costs_follow_what_running_shows_and_one_layer_turns_nothing_over() -> None:
    costs, one = make_costs(in_place_s=1.0, load_s=4.0, compute_s=1.0, overlaps=False), [1]
    costs.observe_in_place(one, 1000.0)
    assert costs.in_place_s(one)[0] < 1.2
    for _ in range(400):
        costs.observe_in_place([1] * 3, 9.0)
        costs.observe_device(one, one, 18.0)
    assert costs.in_place_s(one)[0] == pytest.approx(3.0, rel=1e-3)
    assert costs.device_s(one, one) == pytest.approx([3.0, 18.0], rel=1e-3)


def test_what_a_call_takes_is_learned_too() -> None:
    policy = lost([], in_place_s=1.0, load_s=1.0, compute_s=1.0)
    assert len(policy.choose(demand(3))) == 2
    for _ in range(1000):
        policy.observe_call(5.0)
    assert policy.costs.call_s == pytest.approx(5.0, rel=1e-3)
    assert not policy.choose(demand(3))  # 6 on the device, 5 + 2 with help
    assert len(policy.choose(demand(30))) == 20


# ---- policies


def demand(num_misses: int, *, num_hits: int = 0, num_empty: int = 0) -> LayerDemand:
    return LayerDemand([1] * num_hits, [1] * num_misses, range(num_misses), num_empty)


@pytest.mark.parametrize(("num_empty", "expected"), [(0, [0, 1, 2]), (1, [0, 1]), (3, []), (9, [])])
def test_all_in_place_fills_empty_slots_with_the_worthiest(num_empty: int, expected: list[int]) -> None:
    assert AllInPlace().choose(demand(3, num_empty=num_empty)) == expected


@pytest.mark.parametrize(
    ("share", "num_misses", "expected"),
    [(0.0, 4, 0), (1.0, 4, 4), (0.5, 4, 2), (0.5, 3, 2), (0.5, 1, 1), (0.3, 1, 0), (0.3, 8, 2), (0.5, 0, 0)],
)
def test_a_fixed_share(share: float, num_misses: int, expected: int) -> None:
    assert FixedShare(share).choose(demand(num_misses)) == list(range(expected))


@pytest.mark.parametrize(("num_empty", "expected"), [(0, [0, 1, 2, 3]), (6, [0, 1]), (9, [])])
def test_empty_slots_are_filled_however_fast_the_cpu_is(num_empty: int, expected: list[int]) -> None:
    assert FixedShare(0.5).choose(demand(8, num_empty=num_empty)) == expected
    policy = lost([], in_place_s=1.0, load_s=1000.0, compute_s=1.0)
    assert len(policy.choose(demand(8, num_empty=num_empty))) == max(0, 8 - num_empty)


def test_a_share_beyond_all_is_refused() -> None:
    with pytest.raises(ValueError, match="0 to 1"):
        FixedShare(1.5)


def lost(verdicts: list[Verdict], **costs: float) -> ByCost:
    return ByCost(make_costs(**costs, overlaps=False), on_lost=verdicts.append)  # type: ignore[arg-type]


def test_a_cpu_that_never_helps_is_given_up_and_said_so_once() -> None:
    verdicts: list[Verdict] = []
    policy = lost(verdicts, in_place_s=50.0, load_s=1.0, compute_s=1.0)
    for _ in range(PATIENCE + 5):
        assert not len(policy.choose(demand(0)))  # nothing missed says nothing about the CPU
        assert not len(policy.choose(demand(8)))
    assert policy.is_lost
    assert verdicts == [(50.0 + CALL_S, 2.0)]
    policy.observe_device([1] * 2, [], 0.001)
    assert not len(policy.choose(demand(200)))


def test_a_slow_cpu_still_helps_where_many_miss() -> None:
    verdicts: list[Verdict] = []
    policy = lost(verdicts, in_place_s=5.0, load_s=1.0, compute_s=1.0)
    for _ in range(2 * PATIENCE):
        assert policy.choose(demand(8)) == [0, 1]  # 10 in place beside 12 on the device
    assert not verdicts


def test_the_policy_moves_with_what_layers_took() -> None:
    policy = lost([], in_place_s=2.0, load_s=1.0, compute_s=1.0)
    assert len(policy.choose(demand(8))) == 4
    for _ in range(300):
        policy.observe_in_place([1] * 4, 32.0)
        policy.observe_device([], [1] * 4, 8.0)
    assert len(policy.choose(demand(8))) == 1
