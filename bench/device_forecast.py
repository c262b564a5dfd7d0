"""A forecast of the device's predictor, for a group of 24 of Qwen3-30B-A3B's 48 layers.

Random weights of the trained predictors' sizes, and of wider ones. A forecast is compared with the host's,
then timed in a graph: its nearest steps, which a captured step may wait for, and those that it defers. 6 % of
a step of 48 layers at 60 us, the tables included, leave each of two groups about 80 us.

    python -m bench.device_forecast
"""

from __future__ import annotations

import numpy as np
import torch

from bench.harness import ResultFile, Row, measure
from hetero_gpu.predict import DevicePredictor
from hetero_runtime.orchestrator.captured_foresight import NEAR
from hetero_scheduler.predict.mamba2 import HORIZON, Mamba2Predictor
from hetero_scheduler.predict.mamba2_block import Mamba2Sizes
from hetero_scheduler.predict.mamba2_model import GroupModel, GroupShape

DEVICE = "cuda"

LAYERS, EXPERTS, TOP_K = 24, 128, 8
SIZES = {
    "w96": Mamba2Sizes(d_model=96, state_size=32, head_dim=32),
    "w256": Mamba2Sizes(d_model=256, state_size=64, head_dim=64),
}
ROWS = (1, 2, 4, 8)
MOST_US = 80
MOST_ERROR = 1e-5
FORECASTS = 16
"""In a graph, one after the other."""


def main() -> None:
    torch.manual_seed(0)
    rows = []
    for name, sizes in SIZES.items():
        model = GroupModel(GroupShape(LAYERS, EXPERTS, TOP_K, sizes=sizes))
        rows += [measured(name, model, num_rows) for num_rows in ROWS]
    ResultFile.write("device_forecast", rows)


def measured(name: str, model: GroupModel, num_rows: int) -> Row:
    """Microseconds of a forecast for `num_rows` rows."""
    predictor = DevicePredictor([model], torch.ones(num_rows, dtype=torch.bool, device=DEVICE))
    error = largest_error(predictor, Mamba2Predictor([model]))
    assert error <= MOST_ERROR, f"{name}, {num_rows} rows: {error:.1e} off the host's probabilities"
    megabytes = sum(parameter.nbytes for parameter in model.parameters()) / 1e6
    predictor.defer(NEAR)
    near = microseconds(predictor, is_further=False)
    further = microseconds(predictor, is_further=True) - near
    return Row(
        id=f"device_forecast.{name}_r{num_rows}_us",
        value=near,
        unit="us",
        target=f"<={MOST_US}" if name == "w96" else None,
        note=f"{num_rows} rows, {NEAR} steps, {megabytes:.1f} MB of weights; "
        f"the {HORIZON - NEAR} steps after them {further:.0f} us, beside later layers",
    )


def largest_error(predictor: DevicePredictor, host: Mamba2Predictor) -> float:
    """Of the last row's probabilities after one step."""
    logits = 2 * torch.randn(predictor.router_logits.shape, device=predictor.device)
    for layer, said in enumerate(logits):
        predictor.observe(layer, said)
        host.observe(0, layer, said[-1].cpu().numpy())
    forecast = host.forecast()
    assert forecast is not None, "the last layer triggers the forecast"
    predictor.raise_if_failed()
    return float(np.abs(predictor.probabilities[-1].cpu().numpy() - forecast.probabilities).max())


def microseconds(predictor: DevicePredictor, *, is_further: bool) -> float:
    """Of one forecast's nearest steps, or of all: the median of several replays."""
    last, rows = predictor.router_logits.shape[0] - 1, predictor.router_logits.shape[1]

    def step() -> None:
        for _ in range(FORECASTS):
            predictor.observe(last, predictor.router_logits[last])
            if is_further:
                predictor.look_further(0, rows)
                predictor.take_further(0, rows)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    replays = measure(graph.replay, num_runs=20, num_warmups=3, synchronize=torch.cuda.synchronize)
    predictor.raise_if_failed()
    return 1e6 * replays.median / FORECASTS


if __name__ == "__main__":
    main()
