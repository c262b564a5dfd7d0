"""Copies for insertions: how many are on the link, which go first, which are dropped."""

from __future__ import annotations

import numpy as np
import torch

from hetero_runtime.hf.router_choice import RouterScores
from hetero_runtime.routing import CopiesAhead, Routing, TextPart
from hetero_scheduler import ExpertKey, Lookup
from hetero_scheduler.routing import Shape, make_routing_policy, uncalibrated
from tests.gpu.fake_copier import FakeCopier
from tests.runtime.orchestrator.rig import NUM_EXPERTS, TOP_K, CacheRig

CAPACITY = 5
SHAPE = Shape(2, NUM_EXPERTS, TOP_K)


class Rig:
    """Two layers whose logical caches begin with experts 0 to 4, an empty cache of as many slabs a layer, and
    a link that nobody has to wait for."""

    def __init__(self, *, in_flight: int, insertions: int = 3) -> None:
        self.copier = FakeCopier()
        self.rig = CacheRig(2 * CAPACITY, self.copier, layer_slots=[CAPACITY] * 2)
        policy = make_routing_policy("psr", bonus=0.0, insertions=insertions, window=3)
        self.routing = Routing(policy, SHAPE, capacity=CAPACITY, calibration=uncalibrated(SHAPE))
        self.copies = CopiesAhead(self.rig.cache, self.routing, in_flight=in_flight)
        self.text = self.routing.new_cache()

    def layer(self, layer: int, order: list[int], guess: list[int] | None = None) -> list[ExpertKey]:
        """One token: the router ranks `order`, and the next one, asked early, `guess`. What is submitted
        while the layer runs, its own experts left out: they are not loaded here."""
        said = RouterScores(_scores(order), torch.tensor([order[:TOP_K]]))
        self.routing.choose(layer, said, None if guess is None else _scores(guess))
        self.copies.layer_begins(np.array([order[:TOP_K]]))
        kept = self.copies.kept(layer)
        before = self.rig.cache.present()
        self.rig.cache.begin_layer(layer, frozenset(), kept=kept)
        self.copies.look_ahead(layer, [])
        self.copies.layer_ends(layer, [])
        new = np.argwhere(self.rig.cache.present() & ~before)
        return [ExpertKey(*map(int, key)) for key in new]

    def token(self, first: list[int], guess: list[int], second: list[int]) -> list[list[ExpertKey]]:
        """Both layers."""
        with self.routing.pass_of([TextPart(self.text, np.zeros(1, np.int64))]):
            return [self.layer(0, first, guess), self.layer(1, second)]


def _scores(order: list[int]) -> torch.Tensor:
    scores = torch.full((1, NUM_EXPERTS), -9.0)
    scores[0, order] = -torch.arange(len(order), dtype=torch.float32)
    return scores


def _keys(layer: int, *experts: int) -> list[ExpertKey]:
    return [ExpertKey(layer, expert) for expert in experts]


def test_no_more_than_in_flight_are_on_the_link() -> None:
    rig = Rig(in_flight=2)
    assert rig.token([0, 1], [5, 6, 7], [0, 1]) == [_keys(1, 5, 6), []]
    rig.copier.arrive_next()
    assert rig.token([0, 1], [5, 6, 7], [0, 1]) == [_keys(1, 7), []]
    assert rig.copier.num_submitted == 3


def test_what_has_left_the_logical_cache_meanwhile_is_dropped() -> None:
    rig = Rig(in_flight=1)
    rig.token([0, 1], [5, 6, 7], [0, 1])  # 5 is on the link, 6 and 7 wait
    for order in ([1, 2], [2, 3], [3, 4], [4, 1]):
        scores = _scores([*order, 7]).numpy()[None]
        rig.text.select(scores, np.array([[order]]), np.zeros(1, np.int64), first_layer=1)
    held = rig.text.residents(1).tolist()
    assert 6 not in held
    assert rig.rig.cache.lookup(ExpertKey(1, 6)) is Lookup.MISS
    for _ in range(3):
        rig.copier.synchronize()
        rig.token([0, 1], held, [1, 2])
    assert rig.rig.cache.lookup(ExpertKey(1, 6)) is Lookup.MISS
    assert rig.copier.num_submitted == 1 + (7 in held)


def test_a_copy_that_is_late_for_its_layer_goes_on() -> None:
    rig = Rig(in_flight=2, insertions=1)
    rig.token([0, 1], [5], [0, 1])  # layer 1 ran without 5, which is on the link
    assert rig.rig.cache.lookup(ExpertKey(1, 5)) is Lookup.PENDING
    rig.copier.arrive_next()
    rig.token([0, 1], rig.text.residents(1).tolist(), [0, 1])
    assert rig.rig.cache.lookup(ExpertKey(1, 5)) is Lookup.HIT
    assert rig.copier.num_submitted == 1


def test_after_a_prompt_slabs_are_filled_from_the_logical_cache() -> None:
    rig = Rig(in_flight=8)
    order = [[0, 1], [2, 6]]
    with rig.routing.pass_of([TextPart(rig.text, np.zeros(2, np.int64))]):
        said = RouterScores(torch.cat([_scores(each) for each in order]), torch.tensor(order))
        rig.routing.choose(0, said, None)
        rig.copies.layer_begins(np.array(order))
        rig.copies.layer_ends(0, [])
    held = rig.text.residents(0).tolist()
    assert 6 in held
    on_the_link = [e for e in range(NUM_EXPERTS) if rig.rig.cache.lookup(ExpertKey(0, e)) is Lookup.PENDING]
    assert set(on_the_link) <= set(held)
    assert len(on_the_link) == CAPACITY - TOP_K, "slots are left for the layer to run"


def test_another_texts_wishes_are_forgotten() -> None:
    rig = Rig(in_flight=1)
    rig.token([0, 1], [5, 6, 7], [0, 1])
    rig.text = rig.routing.new_cache()
    rig.copier.arrive_next()
    assert rig.token([0, 1], [0], [0, 1]) == [[], []]
