"""The reference replay: two layers of four experts, with every hit, miss, stall and arrival written down."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hetero_scheduler import SlotMachine, make_eviction
from hetero_scheduler.prefetch import make_schedule
from hetero_scheduler.simulator.replay import Policies, Replay
from hetero_scheduler.simulator.result import Counts
from hetero_scheduler.simulator.scenario import Machine
from tests.scheduler.simulator.scripted import Scripted
from tests.scheduler.simulator.traces import structured_trace, trace_of

LAYERS, EXPERTS, SLOTS = 2, 4, 3
# layer 0 runs at pos 0, 2, 4, ...; after its run each layer is forecast for its next one
SCRIPT = {0: (2, {0: 1}), 1: (3, {1: 1}), 4: (6, {0: 2}), 5: (7, {1: 2})}


def replay_of(used: Sequence[int], *, record_ms: float, documents: int = 1) -> Replay:
    """LRU, three slots for both layers, earliest deadline first; a layer takes 10 ms. `used`: one expert a
    position."""
    topk = [[[used[pos]], [used[pos + 1]]] for pos in range(0, len(used), LAYERS)]
    return Replay(
        trace_of(topk, num_experts=EXPERTS, num_documents=documents),
        slots=SlotMachine(SLOTS, num_layers=LAYERS, num_experts=EXPERTS),
        policies=Policies(
            make_eviction("lru", num_layers=LAYERS, num_experts=EXPERTS),
            make_schedule("edf", num_layers=LAYERS),
            Scripted(SCRIPT, layers=LAYERS, experts=EXPERTS),
            extra=0,
        ),
        machine=Machine(layer_ms=10.0, record_bytes=1_000_000, link_gb_s=1 / record_ms),
    )


def test_every_event_of_four_tokens() -> None:
    #   ms  pos needs            link
    #    0  0   (0,0) miss       demand 0-15; stall 15. Forecast: (0,1)
    #   15                       (0,1) 15-30
    #   25  1   (1,0) miss       (0,1) to 30, demand 30-45; stall 20. Forecast: (1,1)
    #   45                       (1,1) 45-60 over (0,0)
    #   55  2   (0,1) hit        (1,1) arrives at 60
    #   65  3   (1,1) hit
    #   75  4   (0,0) miss       demand 75-90 over (1,0); stall 15. Forecast: (0,2)
    #   90                       (0,2) 90-105 over (0,1)
    #  100  5   (1,1) hit        Forecast: (1,2). (0,2) arrives at 105; (1,2) 105-120 over (0,0)
    #  110  6   (0,3) miss       (1,2) to 120, demand 120-135 over (0,2), unused; stall 25
    #  145  7   (1,2) hit
    replay = replay_of([0, 0, 1, 1, 0, 1, 3, 2], record_ms=15.0)
    counts = replay.run()
    assert counts == Counts(
        required=8,
        hits=4,
        late=0,
        misses=4,
        prefetches=4,
        prefetches_used=3,
        prefetches_wasted=1,
        forecasts=4,
        stall_ms=pytest.approx(15 + 20 + 15 + 25),
    )
    assert replay.now_ms == pytest.approx(155)
    replay.slots.check()


def test_the_first_tokens_are_not_counted() -> None:
    counts = replay_of([0, 0, 1, 1, 0, 1, 3, 2], record_ms=15.0).run(first_counted=2)
    assert (counts.required, counts.hits, counts.misses) == (4, 2, 2)
    assert counts.stall_ms == pytest.approx(15 + 25)


# (0,1) is on the link from 30 to 60; at 40 pos 1 demands (1,0): 60-90; (1,1) follows: 90-120; pos 3 begins at
# 110
def test_a_late_prefetch_stalls_for_what_is_left_of_it() -> None:
    counts = replay_of([0, 0, 1, 1], record_ms=30.0).run()
    assert (counts.hits, counts.late, counts.misses) == (1, 1, 2)
    assert counts.stall_ms == pytest.approx(30 + 50 + 10)
    assert (counts.prefetches_used, counts.prefetches_wasted) == (2, 0)


def test_a_late_prefetch_that_nobody_needs_is_given_up() -> None:
    replay = replay_of([0, 0, 1, 0], record_ms=30.0)
    counts = replay.run()
    assert (counts.hits, counts.late, counts.misses) == (2, 0, 2)
    assert counts.stall_ms == pytest.approx(30 + 50)
    assert (counts.prefetches_used, counts.prefetches_wasted) == (1, 1)
    assert replay.slots.counts().empty == 1


def test_a_document_resets_the_predictor_and_not_the_cache() -> None:
    replay = replay_of([0, 0, 1, 1, 1, 1], record_ms=15.0, documents=3)
    predictor, schedule = replay.policies.predictor, replay.policies.schedule
    counts = replay.run()
    assert isinstance(predictor, Scripted) and schedule is not None
    assert predictor.num_resets == 3
    assert len(schedule) == 0
    # (1,1) is still on its way when the second document begins, and arrives
    assert (counts.hits, counts.misses) == (4, 2)


@pytest.mark.parametrize("overtakes", [False, True])
@pytest.mark.parametrize("in_flight", [1, 2, 5])
def test_the_link_moves_no_more_than_time_allows_and_no_slot_is_lost(in_flight: int, overtakes: bool) -> None:
    trace = structured_trace(60, 3, 12, 2)
    script = {pos: (pos + 3, {pos % 3: (5 * pos) % 12}) for pos in range(170)}
    replay = Replay(
        trace,
        slots=SlotMachine(9, num_layers=3, num_experts=12),
        policies=Policies(
            make_eviction("lfru", num_layers=3, num_experts=12),
            make_schedule("promoe", num_layers=3),
            Scripted(script, layers=3, experts=12),
        ),
        machine=Machine(
            layer_ms=2.0,
            record_bytes=1_000_000,
            link_gb_s=1 / 0.7,
            copies_in_flight=in_flight,
            overtakes=overtakes,
        ),
    )
    for step in range(trace.num_tokens):
        for layer in range(3):
            replay.run_layer(step, layer)
            replay.slots.check()
            assert replay.slots.counts().fetch <= in_flight
            moved = replay.counts.prefetches + replay.counts.misses
            assert (moved - in_flight) * 0.7 <= replay.now_ms
    counts = replay.counts
    assert counts.required == counts.hits + counts.late + counts.misses == 360
    assert counts.prefetches_used + counts.prefetches_wasted <= counts.prefetches
    assert counts.prefetches > 60
