"""The lookahead priority on the device against the host's policy, over steps and hand-overs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hetero_gpu.foresight import ExpiredFirst
from hetero_gpu.tables import DeviceTables
from hetero_scheduler.eviction.lookahead import Lookahead
from hetero_scheduler.predict import Forecast

TOP_K, ROWS, AHEAD = 2, 2, 5


class Both:
    """The policy on the host, and scores of tables that nobody else changes."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.sizes = num_layers, num_experts
        self.host = Lookahead(num_layers, num_experts)
        self.tables = DeviceTables(
            num_slots=8,
            num_layers=num_layers,
            num_experts=num_experts,
            max_pairs=ROWS * TOP_K,
            device=torch.device("cpu"),
        )
        self.device = ExpiredFirst(self.tables)
        self._rng = np.random.default_rng(0)

    def prompt(self) -> None:
        """Layers whose shares only the host sees."""
        for layer in range(self.sizes[0]):
            self.host.observe(layer, self._rng.integers(0, 9, self.sizes[1]))

    def step(self) -> None:
        num_layers, num_experts = self.sizes
        for layer in range(num_layers):
            chosen = np.stack([self._rng.permutation(num_experts)[:TOP_K] for _ in range(ROWS)])
            self.device.begin_layer(layer, torch.from_numpy(np.vstack([chosen, [[-1] * TOP_K]])))
            self.host.observe(layer, np.bincount(chosen.ravel(), minlength=num_experts))
            self.compare(self.host.score)
            coming = range(layer + 1, min(layer + 1 + AHEAD, num_layers))
            if coming:
                said = self._rng.random((len(coming), num_experts), dtype=np.float32)
                self.device.expect(coming, torch.from_numpy(said))
                self.host.observe_forecast(Forecast(said[None], tuple(coming), 0))
                self.device.guard(layer)
                is_free = np.isfinite(self.host.prefetch_score)
                np.testing.assert_array_equal(np.isfinite(self.tables.score.numpy()), is_free)
                self.compare(np.where(is_free, self.host.score, np.inf))

    def compare(self, expected: np.ndarray) -> None:
        np.testing.assert_allclose(self.tables.score.numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize(("num_layers", "num_experts"), [(12, 16), (3, 4), (1, 4)], ids=str)
def test_scores_are_the_hosts_at_every_layer(num_layers: int, num_experts: int) -> None:
    both = Both(num_layers, num_experts)
    both.prompt()
    both.device.load(both.host.kept)
    for _ in range(3):
        both.step()


def test_nothing_is_lost_on_the_way_to_the_host_and_back() -> None:
    both, handed = Both(12, 16), Both(12, 16)
    for each in (both, handed):
        each.prompt()
        each.device.load(each.host.kept)
        each.step()
    handed.device.export()
    assert torch.isfinite(handed.tables.score).all()
    handed.host.restore(handed.tables.score.numpy(), handed.host.passes)
    np.testing.assert_allclose(handed.host.kept, both.host.kept, rtol=1e-12)
    for each in (both, handed):
        each.prompt()
        each.device.load(each.host.kept)
        each.step()
    handed.compare(both.host.score)
