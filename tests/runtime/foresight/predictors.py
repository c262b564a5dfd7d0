"""Predictors that have learnt nothing: right shapes, random weights, which no output may depend on."""

from __future__ import annotations

from pathlib import Path

import torch

from hetero_runtime.plan import read_geometry
from hetero_runtime.prediction import RouterFingerprint, write_predictor
from hetero_runtime.prediction.locate import beside
from hetero_scheduler.predict.mamba2_block import Mamba2Sizes
from hetero_scheduler.predict.mamba2_model import GroupModel, GroupShape

SIZES = Mamba2Sizes(d_model=16, state_size=8, head_dim=8)


def random_models(num_layers: int, num_experts: int, top_k: int, *, seed: int = 0) -> list[GroupModel]:
    """Two groups, or one for a single layer."""
    torch.manual_seed(seed)
    first = max(1, num_layers // 2)
    counts = [count for count in (first, num_layers - first) if count]
    return [GroupModel(GroupShape(count, num_experts, top_k, sizes=SIZES)) for count in counts]


def write_random_predictor(folder: Path) -> Path:
    """Beside the model in `folder`, for it."""
    geometry = read_geometry(folder)
    models = random_models(geometry.num_moe_layers, geometry.num_experts, geometry.top_k)
    path = beside(folder)
    write_predictor(path, models, fingerprint=RouterFingerprint.of_model(geometry), notes={})
    return path
