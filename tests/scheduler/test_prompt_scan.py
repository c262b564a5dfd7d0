"""What a prompt still needs: probabilities, guesses, and who gives way before whom."""

from __future__ import annotations

import numpy as np

from hetero_scheduler import Popularity
from hetero_scheduler.prompt_scan import PromptScan, probability_of_use


def tokens(*counts: int) -> np.ndarray:
    return np.array(counts, dtype=np.int64)


def known(*layers: np.ndarray) -> Popularity:
    popularity = Popularity(len(layers), len(layers[0]))
    for layer, counts in enumerate(layers):
        popularity.observe(layer, counts)
    return popularity


def test_without_history_all_experts_are_alike_and_long_prompts_need_them_all() -> None:
    short, long = (probability_of_use(Popularity(1, 64), num_tokens=num, top_k=4)[0] for num in (1, 128))
    assert np.allclose(short, 4 / 64)
    assert (long > 0.99).all()


def test_probability_grows_with_tokens_and_with_popularity() -> None:
    popularity = known(tokens(100, 10, 1, 0))
    p = [probability_of_use(popularity, num_tokens=num, top_k=1)[0] for num in (1, 4, 64)]
    assert (np.diff(p, axis=0) > 0).all()
    assert (np.diff(p, axis=1) < 0).all()
    assert p[0][0] == 101 / 115


def test_guesses_are_the_likely_ones_hottest_first_and_no_more_than_this_layer_uses() -> None:
    scan = PromptScan(known(tokens(0, 0, 0, 0), tokens(3, 40, 0, 20)), num_tokens=16, top_k=2)
    scan.begin(0, tokens(8, 8, 8, 8))
    assert scan.expected(1).tolist() == [1, 3, 0]
    scan.begin(0, tokens(16, 16, 0, 0))
    assert scan.expected(1).tolist() == [1, 3]


def test_of_a_layer_without_history_only_what_is_nearly_certain_is_expected() -> None:
    popularity = known(tokens(0, 0, 0, 0), tokens(1, 0, 0, 0))
    some, many = (PromptScan(popularity, num_tokens=num, top_k=1) for num in (4, 16))
    assert some.expected(0).tolist() == []  # two of three times each of them would be needed
    assert some.expected(1).tolist() == [0, 1, 2, 3]
    assert many.expected(0).tolist() == [0, 1, 2, 3]


def test_who_gives_way() -> None:
    history = [tokens(0, 0, 0, 0)] * 2 + [tokens(99, 0, 0, 99)] * 2
    scan = PromptScan(known(*history), num_tokens=3, top_k=1)
    scan.begin(0, tokens(2, 1, 0, 0))
    scan.mark_executed(np.array([0, 1]))
    scan.begin(1, tokens(0, 1, 2, 0))
    assert np.isposinf(scan.score[1, 1:3]).all()
    scan.mark_executed(np.array([1, 2]))
    order = np.argsort(scan.score, axis=None, kind="stable")
    names = [divmod(int(i), 4) for i in order if np.isfinite(scan.score.flat[i])]
    assert names[:8] == [(0, 2), (0, 3), (1, 0), (1, 3), (0, 1), (0, 0), (1, 1), (1, 2)]
    assert set(names[8:]) == {(2, 1), (2, 2), (3, 1), (3, 2)}  # layers to come, improbable experts
    resort = scan.last_resort()
    assert np.isfinite(resort).all()
    assert resort[3, 0] < resort[2, 0]  # of those alike the farthest first
    assert resort[2, 1] < resort[3, 0]  # but the improbable before


def test_an_expert_awaited_is_never_the_last_resort() -> None:
    scan = PromptScan(Popularity(2, 4), num_tokens=8, top_k=1)
    scan.begin(0, tokens(4, 4, 0, 0))
    assert np.isposinf(scan.last_resort()[0, :2]).all()


def test_a_layer_that_begins_once_more_keeps_its_executed_experts_longer() -> None:
    scan = PromptScan(Popularity(1, 3), num_tokens=4, top_k=1)
    scan.begin(0, tokens(1, 1, 0), is_last=False)
    scan.mark_executed(np.array([0]))
    assert scan.score[0, 0] > 2
    scan.begin(0, tokens(1, 0, 1))
    scan.mark_executed(np.array([0]))
    assert 1 < scan.score[0, 0] < 2


def test_what_is_foreseen_counts_in_place_of_popularity() -> None:
    scan = PromptScan(
        known(tokens(8, 0, 0, 0), tokens(8, 0, 0, 0), tokens(0, 0, 0, 8)), num_tokens=4, top_k=1
    )
    scan.begin(0, tokens(2, 1, 1, 0))
    before = scan.score[2].copy()
    scan.foresee((1,), np.array([[0.0, 0.3, 0.7, 0.0]]))
    assert scan.expected(1).tolist() == [2, 1]
    assert np.isinf(scan.score[1, 1:3]).all()
    assert (scan.score[1, [0, 3]] == 3).all()  # needed by nobody: the first of that layer to leave
    assert (scan.score[2] == before).all()
    assert scan.last_resort()[1].argmin() == 0
