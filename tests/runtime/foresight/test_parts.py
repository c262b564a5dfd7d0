"""The parts of a foresight: time, room on the link, texts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hetero_gpu import HostCopier
from hetero_runtime.foresight.link import SteadyLink, measure_link
from hetero_runtime.foresight.pace import SMOOTHING, Pace
from hetero_runtime.foresight.prefetcher import MOST_UNDER_WAY, Prefetcher
from hetero_runtime.foresight.rival import Rival
from hetero_runtime.foresight.rows import Row, Rows, at_pass
from hetero_runtime.plan.demand import PREDICTOR_TOKENS
from hetero_scheduler import ExpertKey
from hetero_scheduler.predict import Forecast, RouterShape
from hetero_scheduler.predict.mamba2 import Mamba2Predictor
from hetero_scheduler.prefetch import make_schedule
from hetero_scheduler.prefetch.steering import Steering
from hetero_scheduler.simulator import Scenario, simulate
from hetero_scheduler.trace import Trace
from tests.gpu.fake_copier import FakeCopier
from tests.gpu.timed_copier import TimedCopier
from tests.runtime.foresight.predictors import random_models
from tests.runtime.orchestrator.rig import CacheRig

SHAPE = RouterShape(num_layers=2, num_experts=8, top_k=2)


# ---- time


def test_a_layers_time_leaves_stalls_and_pauses_out() -> None:
    now = [0.0]
    pace = Pace(lambda: now[0])

    def layer_at(seconds: float, stalled: float) -> None:
        now[0] = seconds
        pace.layer_begins(stalled)

    pace.pass_begins()
    layer_at(1.0, 0.0)
    assert pace.layer_s is None
    layer_at(1.5, 0.25)  # half a second, half of it a stall
    assert pace.layer_s == 0.25
    pace.pass_begins()
    layer_at(9.0, 0.25)  # nobody asked for a token for a while
    assert pace.layer_s == 0.25
    layer_at(9.75, 0.25)
    assert pace.layer_s == pytest.approx(0.25 + SMOOTHING * 0.5)


def test_what_is_left_of_a_layer_shrinks_but_not_in_stalls() -> None:
    now = [0.0]
    pace = Pace(lambda: now[0])
    assert pace.left_s(0.0) is None
    for now[0] in (1.0, 2.0):
        pace.layer_begins(0.0)
    assert pace.left_s(0.0) == 1.0
    now[0] = 2.75
    assert pace.left_s(0.0) == 0.25
    assert pace.left_s(0.5) == 0.75
    now[0] = 9.0
    assert pace.left_s(0.5) == 0.0


def test_a_copy_on_the_cpu_overlaps_with_nothing() -> None:
    slab = torch.zeros(64, dtype=torch.uint8)
    link = measure_link(HostCopier(), torch.ones(64, dtype=torch.uint8), slab)
    assert not link.overlaps
    assert link.seconds > 0
    assert slab.all()


# ---- room on the link


def forecast() -> Forecast:
    """Layer 1 at pos 5 wants experts 0, 1, 2 ... in this order."""
    shares = np.array([2.0 ** -(1 + expert) for expert in range(8)], dtype=np.float32)
    return Forecast(shares[None, None].repeat(9, axis=0), (1,), 5)


def prefetcher(
    link: SteadyLink, layer_s: float | None, *, num_slots: int = 12, copier: FakeCopier | None = None
) -> tuple[CacheRig, Prefetcher]:
    rig, pace = CacheRig(num_slots, copier or FakeCopier()), Pace()
    pace.layer_s = layer_s
    steering = Steering(
        make_schedule("edf", num_layers=2), rig.eviction, num_layers=2, per_layer=8, is_shared=True
    )
    steering.take(forecast())
    return rig, Prefetcher(rig.cache, steering, link=link, pace=pace, top_k=2)


def fetched(rig: CacheRig) -> list[int]:
    return np.flatnonzero(rig.cache.present()[1]).tolist()


@pytest.mark.parametrize(
    ("copy_s", "layer_s", "expected"),
    [(1.0, None, 1), (1.0, 0.3, 1), (1.0, 1.0, 1), (1.0, 3.5, 3), (1.0, 1000.0, 8)],
)
def test_as_many_as_the_link_moves_in_a_layer(copy_s: float, layer_s: float | None, expected: int) -> None:
    rig, ahead = prefetcher(SteadyLink(True, copy_s), layer_s)
    for _ in range(2):  # nothing has arrived meanwhile
        ahead.fill(0, [])
    assert fetched(rig) == list(range(expected))
    assert MOST_UNDER_WAY >= 8


@pytest.mark.parametrize(
    ("copy_s", "layer_s", "expected"),
    [
        (1.0, None, []),  # nothing is known of the time
        (1.0, 0.3, []),  # 0.5 times what is hidden is less than 0.5 times the rest
        (1.0, 0.7, [0]),
        (1.0, 1.2, [0]),  # the second would be hidden by a fifth, and is half as likely
        (1.0, 2.9, [0, 1, 2]),
        (1.0, 1000.0, list(range(8))),
    ],
)
def test_where_misses_share_the_disk_a_read_ahead_has_to_be_worth_it(
    copy_s: float, layer_s: float | None, expected: list[int]
) -> None:
    rig, ahead = prefetcher(SteadyLink(True, copy_s, is_spare=False), layer_s)
    ahead.fill(0, [])
    assert fetched(rig) == expected


def test_room_comes_back_when_a_copy_has_arrived() -> None:
    copier = FakeCopier()
    rig, ahead = prefetcher(SteadyLink(True, 1.0), 1.0, copier=copier)
    for expected in (1, 2, 3):
        ahead.fill(0, [])
        assert fetched(rig) == list(range(expected))
        copier.arrive_next()


def test_in_one_layer_room_comes_with_landings_alone() -> None:
    copier = FakeCopier()
    rig, ahead = prefetcher(SteadyLink(True, 1.0), 2.0, copier=copier)
    ahead.fill(0, [])
    ahead.refill()
    ahead.fill(0, [])
    assert fetched(rig) == [0, 1]
    copier.arrive_next()
    ahead.refill()
    assert fetched(rig) == [0, 1, 2]
    copier.arrive_next()
    ahead.fill(0, [])
    assert fetched(rig) == [0, 1, 2, 3]
    rig.cache.check()


def test_later_fills_of_a_layer_leave_as_many_slots() -> None:
    copier = FakeCopier()
    rig, ahead = prefetcher(SteadyLink(True, 1.0), 2.0, num_slots=5, copier=copier)
    ahead.fill(0, [])
    for _ in range(8):
        if copier.pending:
            copier.arrive_next()
        ahead.refill()
    assert fetched(rig) == [0, 1, 2]  # top-2 are left


@pytest.mark.parametrize(("keeps_order", "expected"), [(True, 3), (False, 4)])
def test_reads_that_arrive_out_of_order_make_room(keeps_order: bool, expected: int) -> None:
    copier = FakeCopier()
    rig, ahead = prefetcher(SteadyLink(True, 1.0, keeps_order=keeps_order), 3.0, copier=copier)
    ahead.fill(0, [])
    copier.pending[1].arrive()
    ahead.refill()
    assert len(fetched(rig)) == expected


def test_without_a_schedule_nothing_is_fetched() -> None:
    rig = CacheRig(12, FakeCopier())
    steering = Steering(None, rig.eviction, num_layers=2, per_layer=8, is_shared=True)
    steering.take(forecast())
    Prefetcher(rig.cache, steering, link=SteadyLink(True, 1.0), pace=Pace(), top_k=2).fill(0, [])
    assert fetched(rig) == []


def test_a_layer_finds_slots_for_all_its_experts() -> None:
    rig, ahead = prefetcher(SteadyLink(True, 1.0), 1000.0, num_slots=5)
    running = [ExpertKey(0, 0), ExpertKey(0, 1)]
    rig.cache.begin_layer(0, frozenset(running))
    assert all(rig.cache.load(key) for key in running)
    ahead.fill(0, running)
    assert fetched(rig) == [0, 1, 2]  # of 5 slots, top-2 are left: those that run now


def test_where_nobody_gives_way_one_prefetch_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, ahead = prefetcher(SteadyLink(True, 1.0), 1000.0)
    tried: list[ExpertKey] = []

    def refusing(key: ExpertKey, **_: object) -> bool:
        tried.append(key)
        return False

    monkeypatch.setattr(rig.cache, "prefetch", refusing)
    ahead.fill(0, [])
    assert tried == [ExpertKey(1, 0)]


# ---- texts


def logits(num_tokens: int, *, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(num_tokens, SHAPE.num_layers, SHAPE.num_experts)).astype(np.float16)


def rows(count: int = 2) -> Rows:
    models = random_models(*SHAPE)
    return Rows([Row(Mamba2Predictor(models), SHAPE) for _ in range(count)])


def observed(place: int, of: Rows, prompt: np.ndarray) -> list[Forecast]:
    found = []
    of.row(place).begin_pass()
    for layer in range(SHAPE.num_layers):
        found += of.row(place).observe(layer, prompt[:, layer])
    return found


def test_a_prompt_read_at_once_says_what_its_tokens_say_one_by_one() -> None:
    both, prompt = rows(), logits(12)
    for place in (0, 1):
        both.row(place).begin()
    at_once = observed(0, both, prompt)
    for token in range(12):
        one_by_one = observed(1, both, prompt[token : token + 1])
    assert [one.layers for one in at_once] == [one.layers for one in one_by_one] == [(0,), (1,)]
    for ours, theirs in zip(at_once, one_by_one, strict=True):
        assert ours.first_pos == theirs.first_pos
        assert ours.probabilities == pytest.approx(theirs.probabilities, abs=1e-5)


def test_a_new_text_at_a_place_knows_nothing_of_the_old_one() -> None:
    both, prompt = rows(), logits(5, seed=1)
    both.row(0).begin()
    observed(0, both, logits(30))
    for place in (0, 1):
        both.row(place).begin()
    for ours, theirs in zip(observed(0, both, prompt), observed(1, both, prompt), strict=True):
        assert np.array_equal(ours.probabilities, theirs.probabilities)


def test_a_pass_given_up_is_forgotten_and_long_prompts_are_read_from_their_end() -> None:
    both, prompt = rows(), logits(PREDICTOR_TOKENS + 40)
    for place in (0, 1):
        both.row(place).begin()
    both.row(0).observe(0, prompt[:, 0])  # the pass ends here
    ours, theirs = observed(0, both, prompt), observed(1, both, prompt[40:])
    for one, other in zip(ours, theirs, strict=True):
        assert np.array_equal(one.probabilities, other.probabilities)


def test_places_are_given_lowest_first_and_come_back() -> None:
    places = rows(3)
    assert [places.take() for _ in range(3)] == [0, 1, 2]
    places.give_back(1)
    assert places.active() == [0, 2]
    assert places.take() == 1


def test_a_forecast_is_dated_by_passes_of_the_engine() -> None:
    dated = at_pass(forecast(), 7, num_layers=2)
    assert dated.positions(2)[0].tolist() == [15]
    assert dated.layers == (1,)


def test_the_imagined_link_takes_its_time() -> None:
    copier, slab = TimedCopier(2.0), torch.zeros(4, dtype=torch.uint8)
    transfers = [copier.submit(torch.full((4,), n, dtype=torch.uint8), slab, after=None) for n in (1, 2)]
    copier.advance(3.0)
    assert [transfer.is_done() for transfer in transfers] == [True, False]
    assert slab.tolist() == [1] * 4
    transfers[1].wait()
    assert (copier.now_s, copier.stall_s(), slab.tolist()) == (4.0, 1.0, [2] * 4)


# ---- the rival


def choices(num_tokens: int, *, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    picks = rng.random((num_tokens, SHAPE.num_layers, SHAPE.num_experts)).argsort(axis=-1)
    return picks[..., : SHAPE.top_k]


def tell(rival: Rival, chosen: np.ndarray) -> None:
    """One pass over these tokens."""
    rival.begin_pass()
    for layer in range(SHAPE.num_layers):
        rival.hear(chosen[:, layer])


def test_the_rival_hits_what_lru_hits_in_decode() -> None:
    rival = Rival([range(6)] * SHAPE.num_layers, num_experts=SHAPE.num_experts)
    assert rival.hit_rate() is None
    prompt, answer = choices(5, seed=0), choices(40, seed=1)
    tell(rival, prompt)
    assert rival.hit_rate() is None
    rival.hear(answer[:1, 0])  # a pass that is given up
    for token in range(40):
        tell(rival, answer[token : token + 1])
    topk = np.concatenate([prompt, answer])
    trace = Trace(
        np.zeros((45, *SHAPE[:2]), dtype=np.float16), topk, np.zeros(45, np.int32), np.array([0, 45])
    )
    scenario = Scenario(residency=6 / 16, uncounted=5 / 45)
    assert rival.hit_rate() == pytest.approx(simulate(trace, scenario).hit_rate)


def test_where_a_layers_experts_do_not_fit_there_is_no_rival() -> None:
    rival = Rival([range(1)] * SHAPE.num_layers, num_experts=SHAPE.num_experts)
    tell(rival, choices(1, seed=0))
    assert rival.hit_rate() is None
