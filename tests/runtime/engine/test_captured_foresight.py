"""Forecasts and guesses in graph mode, without a GPU, beside misses that the CPU computes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_gpu import predict
from hetero_gpu.control import ControlRegion
from hetero_runtime.engine import Engine
from hetero_scheduler.predict.mamba2_model import GroupModel
from hetero_scheduler.predict.routing import layer_groups
from tests.architectures import build_checkpoint, prompt_ids
from tests.runtime.engine.test_in_place import HANDLERS
from tests.runtime.foresight.predictors import write_random_predictor
from tests.runtime.steps_on_cpu import steps_on_cpu

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter stands in where there is no GPU"
)

AHEAD: dict[str, dict[str, Any]] = {
    "mamba2": {"preset": "seqmoe"},
    "pregate": {"prediction": {"predictor": "pregate"}, "prefetch": {"schedule": "top_b"}},
}
TEXTS = [prompt_ids(5, seed=seed)[0].tolist() for seed in range(2)]
OPTIONS: dict[str, Any] = {"max_tokens": 9, "ignore_eos": True}


class Guesses:
    """In place of the device's predictor, whose kernels are slow to interpret: forecasts without sense."""

    def __init__(self, models: Sequence[GroupModel], active: torch.Tensor) -> None:
        num_layers = sum(model.shape.num_layers for model in models)
        self.probabilities = torch.zeros(len(active), 3, num_layers, models[0].shape.num_experts)
        self.groups = layer_groups(num_layers, len(models))

    def attach(self, region: ControlRegion) -> None:
        """It never fails."""

    def observe(self, layer: int, router_logits: torch.Tensor) -> None:
        self.probabilities.uniform_()

    def load(self, row: int, states: Sequence[Any], *, forecasts: Sequence[Any] = ()) -> None:
        self.probabilities[row].uniform_()


def load(folder: Path, mode: str, **sections: Any) -> Engine:
    words: dict[str, Any] = {
        "memory": {"residency": 0.8},
        "execution": {"mode": mode, "max_rows": 2, "max_length": 64},
    }
    return Engine.load(folder, device="cpu", **{**words, **sections})


@pytest.mark.parametrize("misses", HANDLERS)
@pytest.mark.parametrize("name", AHEAD)
def test_misses_computed_on_the_cpu_change_no_token(
    name: str, misses: str, *, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows step together, and prefetches land beside what the CPU computes."""
    folder = build_checkpoint("Mixtral", tmp_path)
    write_random_predictor(folder)
    with load(folder, "eager", preset="lru") as engine:
        expected = [engine.generate(text, **OPTIONS).token_ids for text in TEXTS]
    monkeypatch.setattr(predict, "DevicePredictor", Guesses)
    steps_on_cpu(monkeypatch)
    sections = {"misses": HANDLERS[misses], "cpu": {"backend": "torch"}, **AHEAD[name]}
    with load(folder, "graph", **sections) as engine:
        streams = [engine.stream(text, **OPTIONS) for text in TEXTS]
        said = [[delta.token_id for delta in step] for step in zip(*streams, strict=True)]
        assert list(zip(*said, strict=True)) == expected
        engine.check()
        decode = engine.stats().decode
    cache = decode.cache
    assert cache.prefetches > 0
    assert cache.required == cache.hits + cache.late + cache.misses
    assert decode.in_place.experts > 0 or misses == "hybrid"  # that one may find loading faster
    assert decode.in_place.experts <= cache.misses
