"""Scores of forecasts on the device, bit for bit those of the host's policies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetero_gpu.tables import DeviceTables, Running, Windows
from hetero_scheduler import make_eviction
from hetero_scheduler.eviction.belady_rows import BeladyRows
from hetero_scheduler.predict import Forecast
from tests.gpu.tables.host_twin import HostTwin
from tests.gpu.tables.test_ensure import routing, run_layer, tables_of
from tests.gpu.tables.windows_alone import begin_layer

NUM_LAYERS, NUM_EXPERTS = 4, 5
GROUPS = (range(2), range(2, 4))
ONE = torch.ones(1, dtype=torch.bool)
ONE_EXPERT = torch.zeros(1, 1, dtype=torch.int64)


def shares(rng: np.random.Generator, horizon: int, group: range) -> np.ndarray:
    """Coarse ones, so that there are ties. `[horizon, layers, experts]`"""
    coarse = rng.integers(0, 4, size=(horizon, len(group), NUM_EXPERTS)) / 8
    fine = rng.random((horizon, len(group), NUM_EXPERTS))
    return np.where(rng.random() < 0.5, coarse, fine).astype(np.float32)


def put(windows: Windows, row: int, group: range, forecast: np.ndarray) -> None:
    windows.probabilities[row, :, group.start : group.stop] = torch.from_numpy(forecast)


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(horizon=st.integers(1, 11), num_slots=st.integers(2, 12), seed=st.integers(0, 99))
def test_evictions_follow_forecasts_as_the_machines_do(
    device: torch.device, horizon: int, num_slots: int, seed: int
) -> None:
    """Before any forecast, with fresh ones, and with windows that are over."""
    rng = np.random.default_rng(seed)
    twin = HostTwin.of(num_slots, NUM_LAYERS, NUM_EXPERTS, policy="belady")
    tables = tables_of(twin, device)
    windows = Windows(tables, torch.zeros(1, horizon, NUM_LAYERS, NUM_EXPERTS, device=device))
    active = ONE.to(device)
    for step in range(4):
        for layer in range(NUM_LAYERS):
            chosen = routing(rng, NUM_EXPERTS, (1, 2))
            run_layer(tables, twin, layer, chosen, running=Running(windows, active))
            np.testing.assert_array_equal(tables.score.cpu().numpy(), twin.eviction.score)
            for group in GROUPS:
                if layer == group.stop - 1 and step and rng.random() < 0.6:
                    forecast = shares(rng, horizon, group)
                    put(windows, 0, group, forecast)
                    windows.renew(group, active)
                    twin.eviction.observe_forecast(Forecast(forecast, tuple(group), 0))
                    np.testing.assert_array_equal(tables.score.cpu().numpy(), twin.eviction.score)


def test_an_expert_stays_while_any_row_wants_it(device: torch.device) -> None:
    """Rows that do not step keep their windows; rows that have ended want nothing."""
    rows, horizon, rng = 3, 4, np.random.default_rng(1)
    host = BeladyRows(NUM_LAYERS, NUM_EXPERTS, num_rows=rows)
    tables = DeviceTables(
        num_slots=4, num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, max_pairs=8, device=device
    )
    windows = Windows(tables, torch.zeros(rows, horizon, NUM_LAYERS, NUM_EXPERTS, device=device))
    every = [0, 1, 2]

    def host_and_device_renew(row: int) -> None:
        host.turn_to(row, active=every)
        for group in GROUPS:
            forecast = shares(rng, horizon, group)
            put(windows, row, group, forecast)
            windows.renew(group, torch.arange(rows, device=device) == row)
            host.observe_forecast(Forecast(forecast, tuple(group), 0))

    for row in every:
        host_and_device_renew(row)
    for step, stepping in enumerate([[0, 1, 2], [0, 2], [2], [0, 1], [1]]):
        num_stepping = max(stepping) + 1
        active = torch.tensor([row in stepping for row in range(num_stepping)], device=device)
        for layer in range(NUM_LAYERS):
            chosen = rng.integers(-1, NUM_EXPERTS, (num_stepping, 2))
            begin_layer(windows, layer, active, torch.from_numpy(chosen).to(device))
            for row in stepping:
                host.turn_to(row, active=every)
                host.observe(layer, np.bincount(chosen[row][chosen[row] >= 0], minlength=NUM_EXPERTS))
            np.testing.assert_array_equal(tables.score.cpu().numpy(), host.score)
        host_and_device_renew(step % rows)
    windows.forget(1)
    for layer in range(NUM_LAYERS):
        begin_layer(windows, layer, torch.tensor([False], device=device), ONE_EXPERT.to(device))
    host.turn_to(0, active=[0, 2])
    np.testing.assert_array_equal(tables.score.cpu().numpy(), host.score)


def test_scores_go_over_and_stay_until_the_next_forecast(device: torch.device) -> None:
    twin = HostTwin.of(6, NUM_LAYERS, NUM_EXPERTS, policy="belady")
    tables, rng = tables_of(twin, device), np.random.default_rng(2)
    windows = Windows(tables, torch.zeros(1, 3, NUM_LAYERS, NUM_EXPERTS, device=device))
    put(windows, 0, GROUPS[0], shares(rng, 3, GROUPS[0]))
    windows.renew(GROUPS[0], ONE.to(device))
    left = tables.score.cpu().numpy().copy()
    for policy in (
        make_eviction("belady", num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS),
        BeladyRows(NUM_LAYERS, NUM_EXPERTS, num_rows=2),
    ):
        policy.observe_forecast(Forecast(shares(rng, 3, GROUPS[1]), tuple(GROUPS[1]), 0))
        tables.to_machine(twin.machine, policy)
        for layer in (0, 2):  # a prompt: foreseen experts keep their scores, others score by last use
            policy.observe(layer, np.array([1, 0, 1, 0, 0]))
        np.testing.assert_array_equal(policy.score[:2], left[:2])
        assert policy.score[2].tolist() == [-0.5, -np.inf, -0.5, -np.inf, -np.inf]


@pytest.mark.parametrize(
    ("probabilities", "message"),
    [
        (torch.zeros(1, 2, 3, NUM_EXPERTS), "for 4 layers of 5 experts"),
        (torch.zeros(2, NUM_LAYERS, NUM_EXPERTS), "for 4 layers of 5 experts"),
        (torch.zeros(1, 2, NUM_LAYERS, NUM_EXPERTS, dtype=torch.float64), "contiguous float32"),
        (torch.zeros(1, 2, NUM_EXPERTS, NUM_LAYERS).transpose(2, 3), "contiguous float32"),
    ],
    ids=["layers", "dimensions", "dtype", "strides"],
)
def test_probabilities_that_the_kernel_cannot_read_are_refused(
    probabilities: torch.Tensor, message: str
) -> None:
    tables = tables_of(HostTwin.of(4, NUM_LAYERS, NUM_EXPERTS, policy="lru"), torch.device("cpu"))
    with pytest.raises(ValueError, match=message):
        Windows(tables, probabilities)
