"""The lookahead predictor on the device against the host's, step by step, and the hand-over both ways."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hetero_gpu.predict.lookahead import DeviceLookahead
from hetero_scheduler.predict.lookahead_mlp import LookaheadMlp
from tests.runtime.foresight.predictors import random_lookahead

NUM_LAYERS, NUM_EXPERTS, TOP_K, HIDDEN, VISUAL = 7, 12, 3, 10, 6


class Texts:
    """`rows` texts, on the host and on the device; random routing, seen by both."""

    def __init__(self, rows: int) -> None:
        weights, shape = random_lookahead(
            NUM_LAYERS, NUM_EXPERTS, hidden_size=HIDDEN, visual_size=VISUAL, top_k=TOP_K
        )
        first = LookaheadMlp(weights, shape)
        self.hosts = [first, *(first.another() for _ in range(rows - 1))]
        self.active = torch.ones(rows, dtype=torch.bool)
        self.device = DeviceLookahead(weights, shape, active=self.active)
        self._rng = np.random.default_rng(0)

    def read(self, row: int) -> None:
        """A prompt of five tokens with an image, by the host."""
        self.hosts[row].see(torch.from_numpy(self._rng.normal(size=VISUAL).astype(np.float32)))
        for layer in range(NUM_LAYERS):
            chosen = np.stack([self._rng.permutation(NUM_EXPERTS)[:TOP_K] for _ in range(5)])
            self.hosts[row].observe_tokens(0, layer, chosen, torch.ones(HIDDEN))
        self.device.load(row, self.hosts[row].remembered())

    def step(self) -> None:
        """A token of every active row, heard by both; they say the same."""
        rows = range(len(self.hosts))
        for layer in range(NUM_LAYERS):
            chosen = torch.from_numpy(np.stack([self._rng.permutation(NUM_EXPERTS)[:TOP_K] for _ in rows]))
            hidden = torch.from_numpy(self._rng.normal(size=(len(rows), HIDDEN)).astype(np.float32))
            self.device.hear(layer, torch.where(self.active[:, None], chosen, -1))
            expected = []
            for row in rows:
                if self.active[row]:
                    self.hosts[row].observe_tokens(1, layer, chosen[row : row + 1].numpy(), hidden[row])
                    expected.append(self.hosts[row].forecast())
            if layer == NUM_LAYERS - 1:
                assert expected == [None] * len(expected)
                continue
            said = self.device.foresee(layer, hidden)
            shares = np.max([each.probabilities[0] for each in expected if each is not None], axis=0)
            np.testing.assert_allclose(said.numpy(), shares, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 3])
def test_it_says_what_the_host_says_and_of_rows_the_most(rows: int) -> None:
    texts = Texts(rows)
    for row in range(rows):
        texts.read(row)
    for _ in range(3):
        texts.step()


def test_rows_that_do_not_step_stay_as_they_are() -> None:
    texts = Texts(2)
    texts.read(0), texts.read(1)
    texts.active[0] = False
    texts.step()
    texts.active[0] = True
    texts.step()
    for row in range(2):
        np.testing.assert_allclose(
            texts.device.history(row), texts.hosts[row].remembered().history, rtol=1e-6
        )


def test_the_host_goes_on_from_what_the_device_has_heard() -> None:
    texts = Texts(2)
    texts.read(0), texts.read(1)
    texts.step()
    kept = texts.hosts[1].remembered().history
    texts.hosts[1].remember(np.zeros_like(kept))
    texts.hosts[1].remember(texts.device.history(1))
    np.testing.assert_allclose(texts.hosts[1].remembered().history, kept, rtol=1e-6)
    assert not np.allclose(kept, texts.device.history(0))
    texts.read(1)  # a place taken again; the other row stays
    texts.step()
