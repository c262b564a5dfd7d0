"""Predictors that have learnt nothing: right shapes, random weights, which no output may depend on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from hetero_runtime.beside_model import beside
from hetero_runtime.lookahead import LOOKAHEAD_SUFFIX
from hetero_runtime.lookahead.file import write_lookahead
from hetero_runtime.plan import read_geometry
from hetero_runtime.prediction import RouterFingerprint, write_predictor
from hetero_runtime.prediction.locate import PREDICTOR_SUFFIX
from hetero_scheduler.predict.lookahead_features import LookaheadShape
from hetero_scheduler.predict.lookahead_model import LookaheadModel, LookaheadWeights
from hetero_scheduler.predict.mamba2_block import Mamba2Sizes
from hetero_scheduler.predict.mamba2_model import GroupModel, GroupShape
from hetero_scheduler.predict.refinement import Refinement

SIZES = Mamba2Sizes(d_model=16, state_size=8, head_dim=8)


def random_models(num_layers: int, num_experts: int, top_k: int, *, seed: int = 0) -> list[GroupModel]:
    """Two groups, or one for a single layer."""
    torch.manual_seed(seed)
    first = max(1, num_layers // 2)
    counts = [count for count in (first, num_layers - first) if count]
    return [GroupModel(GroupShape(count, num_experts, top_k, sizes=SIZES)) for count in counts]


def random_refinement(num_layers: int, num_experts: int, *, seed: int = 0) -> Refinement:
    """Of 40 tokens. A token and the next router move forecasts about as far as they are wide."""
    draw = np.random.default_rng(seed)

    def normal(*shape: int) -> npt.NDArray[np.float32]:
        return draw.normal(size=shape).astype(np.float16).astype(np.float32)  # as its file keeps it

    return Refinement(
        scale=np.abs(normal(num_layers)),
        embedding=normal(40, 4),
        head=normal(num_layers, num_experts, 4),
        bias=normal(num_layers, num_experts),
        pool=np.abs(normal(num_layers, 2)),
    )


def write_random_predictor(folder: Path, *, is_refined: bool = False) -> Path:
    """Beside the model in `folder`, for it."""
    geometry = read_geometry(folder)
    models = random_models(geometry.num_moe_layers, geometry.num_experts, geometry.top_k)
    refinement = random_refinement(geometry.num_moe_layers, geometry.num_experts) if is_refined else None
    path = beside(folder, PREDICTOR_SUFFIX)
    fingerprint = RouterFingerprint.of_model(geometry)
    write_predictor(path, models, fingerprint=fingerprint, notes={}, refinement=refinement)
    return path


def random_lookahead(
    num_layers: int, num_experts: int, *, hidden_size: int, visual_size: int, top_k: int, seed: int = 0
) -> tuple[LookaheadWeights, LookaheadShape]:
    """Confident, and as often wrong as a guess."""
    shape = LookaheadShape(num_layers, num_experts, top_k, hidden_size, visual_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LookaheadModel(shape, width=16, dropout=0.0).eval()
    weights = model.fold()
    return weights._replace(outer=4 * weights.outer), shape


def write_random_lookahead(folder: Path, *, semantic_depth: int = 1, sees: bool = False) -> Path:
    """Beside the model in `folder`, for it. `sees`: whether it looks at images."""
    geometry = read_geometry(folder)
    hidden = geometry.hidden_size
    weights, shape = random_lookahead(
        geometry.num_moe_layers,
        geometry.num_experts,
        hidden_size=hidden,
        visual_size=hidden if sees else 0,
        top_k=geometry.top_k,
    )
    path = beside(folder, LOOKAHEAD_SUFFIX)
    fingerprint = RouterFingerprint.of_model(geometry)
    write_lookahead(
        path, weights, shape, fingerprint=fingerprint, semantic_depth=semantic_depth, notes={"recall": []}
    )
    return path
