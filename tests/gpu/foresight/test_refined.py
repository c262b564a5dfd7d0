"""Forecasts made anew on the device are the host's refinement's, and so are the scores that follow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from hetero_gpu.foresight import RefinedForecasts
from hetero_gpu.tables import DeviceTables, Windows
from hetero_scheduler.eviction.belady_rows import BeladyRows
from hetero_scheduler.predict import Forecast
from hetero_scheduler.predict.refinement import Refinement
from tests.gpu.tables.windows_alone import begin_layer
from tests.runtime.foresight.predictors import random_refinement

ROWS, HORIZON, LAYERS, EXPERTS = 3, 3, 4, 7
KNOWN, UNKNOWN = 39, 1000
"""Tokens: the refinement is of 40."""


class Rig:
    """Rows 0 and 1 have forecasts, row 2 has none."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tables = DeviceTables(
            num_slots=8, num_layers=LAYERS, num_experts=EXPERTS, max_pairs=8, device=device
        )
        shares = torch.rand((ROWS, HORIZON, LAYERS, EXPERTS), generator=torch.Generator().manual_seed(0))
        shares[0, 0, 1, :3] = 0.0  # what is foreseen of nobody
        self.windows = Windows(self.tables, (shares / shares.sum(-1, keepdim=True)).to(device))
        self.windows.renew(range(LAYERS), self.mask(True, True, False))
        self.refinement = random_refinement(LAYERS, EXPERTS)
        self.refined = RefinedForecasts(self.windows, self.refinement)

    def mask(self, *rows: bool) -> torch.Tensor:
        return torch.tensor(rows, device=self.device)

    def shares(self) -> np.ndarray:
        return self.windows.probabilities.cpu().numpy().copy()

    def assert_scores_follow(self) -> None:
        """Scores are those of the probabilities as they are now, for rows whose entry 0 is to come."""
        host = BeladyRows(LAYERS, EXPERTS, num_rows=ROWS)
        for row in (0, 1):
            host.turn_to(row, active=[0, 1])
            host.observe_forecast(Forecast(self.shares()[row], tuple(range(LAYERS)), 0))
        np.testing.assert_array_equal(self.tables.score.cpu().numpy(), host.score)


@pytest.mark.parametrize("token", [0, 17, KNOWN, UNKNOWN], ids=["first", "some", "last", "unknown"])
def test_a_token_refines_all_layers_of_the_step_that_begins(device: torch.device, token: int) -> None:
    rig = Rig(device)
    before = rig.shares()
    rig.refined.with_tokens(torch.tensor([token, 5, 5], device=device), rig.mask(True, False, True))
    after = rig.shares()
    expected = rig.refinement.with_tokens(before[0, 0], np.array(token))
    np.testing.assert_allclose(after[0, 0], expected, rtol=1e-4, atol=1e-6)
    assert np.abs(after[0, 0] - before[0, 0]).max() > 0.05
    after[0, 0] = before[0, 0]
    np.testing.assert_array_equal(after, before)  # later steps, idle rows, rows without a forecast
    rig.assert_scores_follow()
    assert rig.windows.window.tolist() == [[0] * LAYERS, [0] * LAYERS, [-1] * LAYERS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_next_router_refines_its_layer(device: torch.device, dtype: torch.dtype) -> None:
    rig, layer = Rig(device), 2
    before = rig.shares()
    said = (3 * torch.randn((ROWS, EXPERTS), generator=torch.Generator().manual_seed(1))).to(dtype)
    rig.refined.with_next_router(layer, said.to(device), rig.mask(True, True, True))
    after = rig.shares()
    for row in (0, 1):
        expected = rig.refinement.with_next_router(
            before[row, 0, layer : layer + 1], said[row : row + 1].float().numpy(), slice(layer, layer + 1)
        )
        np.testing.assert_allclose(after[row, 0, layer], expected[0], rtol=1e-4, atol=1e-6)
        after[row, 0, layer] = before[row, 0, layer]
    np.testing.assert_array_equal(after, before)
    rig.assert_scores_follow()


def test_fewer_rows_step_than_there_are(device: torch.device) -> None:
    rig = Rig(device)
    before = rig.shares()
    rig.refined.with_tokens(torch.tensor([3, 4, 5], device=device), rig.mask(True))
    after = rig.shares()
    assert np.abs(after[0, 0] - before[0, 0]).max() > 0.05
    np.testing.assert_array_equal(after[1:], before[1:])


def test_a_layer_that_has_begun_is_refined_no_more(device: torch.device) -> None:
    """Entry 0 lies behind it; of the other layers the step is still to come."""
    rig = Rig(device)
    everyone = rig.mask(True, True, True)
    begin_layer(rig.windows, 0, everyone, torch.zeros(3, 1, dtype=torch.int64, device=device))
    before = rig.shares()
    rig.refined.with_tokens(torch.tensor([3, 4, 5], device=device), everyone)
    after = rig.shares()
    np.testing.assert_array_equal(after[:, :, 0], before[:, :, 0])
    assert (np.abs(after[:2, 0, 1:] - before[:2, 0, 1:]).max(axis=-1) > 0).all()


def test_another_models_refinement_is_refused(device: torch.device) -> None:
    rig = Rig(device)
    with pytest.raises(ValueError, match="a refinement of"):
        RefinedForecasts(rig.windows, random_refinement(LAYERS + 1, EXPERTS))
    weights: Refinement = replace(rig.refinement, pool=None)
    with pytest.raises(ValueError, match="has learned nothing of routers"):
        RefinedForecasts(rig.windows, weights).with_next_router(
            1, torch.zeros((1, EXPERTS), device=device), rig.mask(True)
        )
