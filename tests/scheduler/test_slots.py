"""The slot machine as a script: small ints as keys, one move a line."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_scheduler import ExpertKey, Lookup, SlotMachine, SlotState
from hetero_scheduler.eviction import keeping

FETCH, COMPUTE = SlotState.FETCH, SlotState.COMPUTE


def machine(num_slots: int = 2, layer_slots: list[int] | None = None) -> SlotMachine:
    return SlotMachine(num_slots, num_layers=2, num_experts=4, layer_slots=layer_slots)


def scores(**by_expert: float) -> np.ndarray:
    """`a0=1.0`: score of layer 0 ("a"), expert 0; the rest 0."""
    table = np.zeros((2, 4))
    for name, value in by_expert.items():
        table["ab".index(name[0]), int(name[1])] = value
    return table


def key(name: str) -> ExpertKey:
    return ExpertKey("ab".index(name[0]), int(name[1]))


def hold(m: SlotMachine, name: str, score: np.ndarray | None = None) -> int:
    """Load, execute, release: `name` ends USED. Returns its slot."""
    held = m.reserve(key(name), COMPUTE, score=scores() if score is None else score)
    assert held is not None
    m.release(key(name))
    return held.slot


def test_a_prefetch_goes_from_empty_over_fetch_and_compute_to_used() -> None:
    m = machine()
    held = m.reserve(key("b1"), FETCH, score=scores())
    assert held is not None
    assert (held.slot, held.evicted) == (0, None)
    assert m.lookup(key("b1")) is Lookup.PENDING
    m.land(held.slot, held.tag)
    assert m.lookup(key("b1")) is Lookup.HIT
    assert m.state(0) is COMPUTE
    m.release_layer(0)
    assert m.state(0) is COMPUTE  # layer 1's expert waits for layer 1
    m.release_layer(1)
    assert m.state(0) is SlotState.USED
    m.check()


def test_empty_first_then_the_least_score_then_the_lowest_slot() -> None:
    m = machine(3)
    assert [hold(m, name) for name in ("a0", "a1", "a2")] == [0, 1, 2]
    held = m.reserve(key("b0"), COMPUTE, score=scores(a0=3, a1=1, a2=2))
    assert held is not None
    assert (held.slot, held.evicted) == (1, key("a1"))
    assert m.lookup(key("a1")) is Lookup.MISS
    m.release(key("b0"))
    held = m.reserve(key("b1"), COMPUTE, score=scores())  # all equal
    assert held is not None
    assert held.slot == 0


def test_fetch_compute_pinned_and_protected_slots_are_never_evicted() -> None:
    m = machine(4)
    m.reserve(key("a0"), FETCH, score=scores())
    m.reserve(key("a1"), COMPUTE, score=scores())
    hold(m, "a2")
    m.pin(key("a2"))
    hold(m, "a3")
    assert m.num_available(0) == 1
    assert m.reserve(key("b0"), COMPUTE, score=scores(), protected={key("a3")}) is None
    assert m.lookup(key("b0")) is Lookup.MISS
    held = m.reserve(key("b0"), COMPUTE, score=scores())
    assert held is not None
    assert held.evicted == key("a3")
    m.release(key("b0"))
    m.unpin(key("a2"))
    assert m.num_available(0) == 2
    m.check()


def test_a_stale_landing_changes_nothing() -> None:
    m = machine(1)
    old = m.reserve(key("a0"), FETCH, score=scores())
    assert old is not None
    m.abort(old.slot, old.tag)
    new = m.reserve(key("a1"), FETCH, score=scores())
    assert new is not None
    assert new.tag > old.tag
    m.land(old.slot, old.tag)
    m.abort(old.slot, old.tag)
    assert m.lookup(key("a1")) is Lookup.PENDING
    m.land(new.slot, new.tag)
    assert m.lookup(key("a1")) is Lookup.HIT


def test_a_restored_machine_goes_on_as_the_exported_one() -> None:
    m, other = machine(3), machine(3)
    m.reserve(key("b1"), FETCH, score=scores())
    hold(m, "a0")
    hold(m, "a3")
    m.pin(key("a3"))
    other.restore(m.export())
    for one in (m, other):
        assert one.lookup(key("b1")) is Lookup.PENDING
        held = one.reserve(key("b0"), COMPUTE, score=scores())
        assert (held.slot, held.tag, held.evicted) == (1, 4, key("a0"))  # type: ignore[union-attr]
        one.land(0, 1)
        assert one.state(0) is COMPUTE
    for ours, theirs in zip(m.export(), other.export(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_table_that_breaks_the_rules_is_not_restored() -> None:
    m = machine()
    hold(m, "a0")
    table = m.export()
    with pytest.raises(AssertionError, match="next tag 0 < 2"):
        m.restore(table._replace(next_tag=0))
    table.state[0] = SlotState.EMPTY
    with pytest.raises(AssertionError, match="EMPTY slot names an expert"):
        machine().restore(table)


def test_a_failed_load_gives_its_slot_back() -> None:
    m = machine(1)
    held = m.reserve(key("a0"), COMPUTE, score=scores())
    assert held is not None
    m.abort(held.slot, held.tag)
    assert m.counts() == (1, 0, 0, 0)
    assert m.lookup(key("a0")) is Lookup.MISS
    m.check()


def test_per_layer_pools_do_not_lend() -> None:
    m = machine(3, layer_slots=[1, 2])
    assert hold(m, "a0") == 0
    assert hold(m, "b0") == 1
    assert hold(m, "a1") == 0
    assert m.lookup(key("a0")) is Lookup.MISS
    assert m.num_available(1) == 2
    m.check()


@pytest.mark.parametrize(
    ("num_slots", "layer_slots", "message"),
    [(-1, None, "fewer than none"), (3, [1, 1], "does not split 3"), (2, [2], "does not split 2")],
)
def test_impossible_pools_are_refused(num_slots: int, layer_slots: list[int] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        machine(num_slots, layer_slots)


@pytest.mark.parametrize(
    "move",
    [
        lambda m: m.land(m.slot(key("a0")), m.tag(m.slot(key("a0")))),
        lambda m: m.abort(m.slot(key("a0")), m.tag(m.slot(key("a0")))),
        lambda m: m.reserve(key("a0"), COMPUTE, score=scores()),
        lambda m: m.pin(key("a1")),
        lambda m: m.release(key("a1")),
    ],
    ids=["land USED", "abort USED", "reserve twice", "pin a miss", "release a miss"],
)
def test_illegal_moves_are_asserted(move: object) -> None:
    m = machine()
    hold(m, "a0")
    with pytest.raises(AssertionError):
        move(m)  # type: ignore[operator]


VERBS = st.tuples(
    st.sampled_from(["fetch", "load", "land", "abort", "release", "layer", "evict", "pin", "unpin"]),
    st.integers(0, 1),
    st.integers(0, 3),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(VERBS, max_size=60), st.sampled_from([None, [1, 3], [2, 2]]))
def test_slots_are_conserved_under_any_sequence_of_legal_verbs(
    verbs: list[tuple[str, int, int]], layer_slots: list[int] | None
) -> None:
    m = machine(4, layer_slots)
    rng = np.random.default_rng(0)
    pinned: set[ExpertKey] = set()
    for verb, layer, expert in verbs:
        k = ExpertKey(layer, expert)
        found = m.lookup(k)
        if verb in ("fetch", "load") and found is Lookup.MISS:
            m.reserve(k, FETCH if verb == "fetch" else COMPUTE, score=rng.random((2, 4)))
        elif verb == "land" and found is Lookup.PENDING:
            m.land(m.slot(k), m.tag(m.slot(k)))
        elif verb == "abort" and found is not Lookup.MISS and m.state(m.slot(k)) in (FETCH, COMPUTE):
            if k not in pinned:
                m.abort(m.slot(k), m.tag(m.slot(k)))
        elif verb == "release" and found is Lookup.HIT:
            m.release(k)
        elif verb == "layer":
            m.release_layer(layer)
        elif verb == "evict" and found is Lookup.HIT and m.state(m.slot(k)) is SlotState.USED:
            if k not in pinned:
                m.evict(k)
        elif verb == "pin" and found is Lookup.HIT:
            m.pin(k)
            pinned.add(k)
        elif verb == "unpin" and k in pinned:
            m.unpin(k)
            pinned.discard(k)
        m.check()
        assert all(m.lookup(p) is Lookup.HIT for p in pinned)


def test_an_expert_that_scores_infinity_stays() -> None:
    m = machine()
    hold(m, "a0")
    hold(m, "a1")
    assert m.reserve(key("b0"), FETCH, score=scores(a0=np.inf, a1=np.inf)) is None
    held = m.reserve(key("b0"), FETCH, score=scores(a0=np.inf, a1=9))
    assert held is not None
    assert held.evicted == key("a1")
    m.check()


@pytest.mark.parametrize("seed", range(20))
def test_scores_that_keep_some_evict_as_protecting_them_does(seed: int) -> None:
    rng = np.random.default_rng(seed)
    score = rng.integers(0, 3, size=scores().shape).astype(np.float64)
    kept = [key(name) for name in ("a0", "a2", "b1", "b3") if rng.random() < 0.5]
    evicted = []
    for one, protected in ((score, kept), (keeping(score, kept), [])):
        m = machine(4)
        for name in ("a0", "a1", "a2", "b1"):
            hold(m, name)
        held = m.reserve(key("b0"), FETCH, score=one, protected=protected)
        evicted.append(None if held is None else held.evicted)
    assert evicted[0] == evicted[1]
    assert evicted[0] not in kept


def test_what_a_layer_holds_of_some_experts() -> None:
    m = machine(4, layer_slots=[3, 1])
    m.reserve(key("a0"), FETCH, score=scores())
    m.reserve(key("a1"), COMPUTE, score=scores())
    hold(m, "a2")
    m.reserve(key("b0"), COMPUTE, score=scores())
    everyone = [key(name) for name in ("a0", "a1", "a2", "a3", "b0")]
    assert [m.num_held(layer, everyone) for layer in (0, 1)] == [2, 1]
    assert m.num_held(0, everyone[:1]) == 1
    assert m.num_held(0, []) == 0


def test_what_a_layer_has_and_lacks() -> None:
    m = machine(3)
    hold(m, "b3")
    m.reserve(key("b0"), COMPUTE, score=scores())
    m.reserve(key("b1"), FETCH, score=scores())
    assert m.residents(1).tolist() == [0, 3]
    assert m.absent(1).tolist() == [False, False, True, False]
    assert m.slots(1, np.array([3, 1, 2])).tolist() == [0, 2, -1]


def test_slots_are_released_together_or_not_at_all() -> None:
    m = machine(3)
    hold(m, "a0")
    m.reserve(key("a1"), COMPUTE, score=scores())
    m.reserve(key("a2"), FETCH, score=scores())
    m.release_slots([0, 1])
    assert m.counts() == (0, 1, 0, 2)
    with pytest.raises(AssertionError, match="illegal release"):
        m.release_slots([1, 2])


def test_retired_slots_take_nobody_and_every_layer_keeps_some() -> None:
    machine = SlotMachine(4, num_layers=2, num_experts=4, layer_slots=[1, 3])
    score = np.zeros((2, 4))
    assert machine.spare(score=score, least=3) is None
    for slot in (1, 2):
        assert machine.spare(score=score, least=1) == slot
        machine.retire(slot)
        machine.check()
    assert machine.spare(score=score, least=1) is None
    assert (machine.num_in_service(0), machine.num_in_service(1)) == (1, 1)
    assert (machine.num_empty(0), machine.num_empty(1)) == (1, 1)
    held = machine.reserve(ExpertKey(1, 0), SlotState.COMPUTE, score=score)
    assert held is not None
    assert held.slot == 3
    assert machine.reserve(ExpertKey(1, 1), SlotState.COMPUTE, score=score) is None
    assert machine.recall(5) == 2
    machine.check()
    assert machine.reserve(ExpertKey(1, 1), SlotState.COMPUTE, score=score) is not None
    with pytest.raises(AssertionError, match="slot 3 holds"):
        machine.retire(3)
