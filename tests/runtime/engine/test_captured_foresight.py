"""Forecasts of steps to come and guesses a layer ahead, in graph mode without a GPU: steps of both ways."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_gpu import predict
from hetero_gpu.control import ControlRegion
from hetero_runtime.cli.summary import summary_table
from hetero_runtime.engine import Engine
from hetero_runtime.orchestrator.captured_foresight import CapturedForesight
from hetero_scheduler.predict.mamba2_model import GroupModel
from hetero_scheduler.predict.routing import layer_groups
from tests.architectures import build_checkpoint, prompt_ids
from tests.runtime.both_ways import slow_with_forecasts, ways_change_often
from tests.runtime.foresight.predictors import write_random_predictor
from tests.runtime.steps_on_cpu import steps_on_cpu

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter stands in where there is no GPU"
)

AHEAD: dict[str, dict[str, Any]] = {
    "mamba2": {"preset": "seqmoe"},
    "pregate": {"prediction": {"predictor": "pregate"}, "prefetch": {"schedule": "top_b"}},
}
TEXTS = [prompt_ids(5, seed=seed)[0].tolist() for seed in range(3)]
LENGTHS = (10, 4, 5)


def load(folder: Path, mode: str, **sections: Any) -> Engine:
    words: dict[str, Any] = {
        "memory": {"residency": 0.8},
        "execution": {"mode": mode, "max_rows": 2, "max_length": 64},
    }
    return Engine.load(folder, device="cpu", **{**words, **sections})


def said_together(engine: Engine) -> list[tuple[int, ...]]:
    """Two texts step together; when the shorter one ends, the third takes its place."""
    streams = [
        engine.stream(text, max_tokens=length, ignore_eos=True)
        for text, length in zip(TEXTS, LENGTHS, strict=True)
    ]
    said: list[list[int]] = [[], [], []]
    for turn in range(max(LENGTHS) + 1):  # a text gives its place back when it is asked once more
        for text in (0, 1 if turn <= LENGTHS[1] else 2):
            if (delta := next(streams[text], None)) is not None:
                said[text].append(delta.token_id)
    return [tuple(tokens) for tokens in said]


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


@pytest.mark.parametrize("name", AHEAD)
def test_rows_say_the_same_while_ways_change(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Texts begin and end in steps of both ways. Once forecasts are found not to pay, no prompt is read for
    them any more."""
    folder = build_checkpoint("Mixtral", tmp_path)
    write_random_predictor(folder)
    with load(folder, "eager", preset="lru") as engine:
        expected = [
            engine.generate(text, max_tokens=length, ignore_eos=True).token_ids
            for text, length in zip(TEXTS, LENGTHS, strict=True)
        ]
    read, take = [], CapturedForesight.take
    monkeypatch.setattr(CapturedForesight, "take", lambda *words: (read.append(words[1]), take(*words)))
    monkeypatch.setattr(predict, "DevicePredictor", Guesses)
    ways_change_often(monkeypatch)
    steps_on_cpu(monkeypatch)
    with load(folder, "graph", **AHEAD[name]) as engine:
        sequences: Any = engine._parts.sequences
        assert len(sequences._graphs) == 2 * 2  # ways, numbers of rows
        read.clear()
        orchestrator: Any = engine._parts.orchestrator
        ways: list[int] = []
        monkeypatch.setattr(orchestrator, "observe_steps", slow_with_forecasts(orchestrator, ways))
        assert said_together(engine) == expected
        engine.check()
        assert ways[:4] == [0, 0, 0, 1] and 0 in ways[ways.index(1) :]
        assert engine.stats().is_plain and engine.stats().to_json()["is_plain"]
        assert "tokens are decoded without forecasts from now on" in caplog.text
        decode = engine.stats().decode
        assert decode.cache.prefetches > 0
        assert decode.cache.required == decode.cache.hits + decode.cache.late + decode.cache.misses
        num_read = len(read)
        assert num_read == (3 if name == "mamba2" else 0)
        completion = engine.generate(TEXTS[1], max_tokens=2, ignore_eos=True)
        assert completion.token_ids == expected[1][:2]
        table = summary_table(engine.stats(), completion.timings)
        assert next(iter(table.columns[2].cells)) == "graph, without prefetches"
        assert len(read) == num_read
        engine.check()


def test_steps_told_to_have_forecasts_have_them_and_decide_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps_on_cpu(monkeypatch)
    with load(build_checkpoint("Mixtral", tmp_path), "graph", **AHEAD["pregate"]) as engine:
        orchestrator: Any = engine._parts.orchestrator
        before = dict(vars(orchestrator._prefetch.trials))
        with orchestrator.with_forecasts():
            expected = engine.generate(TEXTS[0], max_tokens=4, ignore_eos=True).token_ids
            assert not engine.stats().is_plain
            assert engine.stats().decode.cache.prefetches > 0
        assert dict(vars(orchestrator._prefetch.trials)) == before
        assert engine.generate(TEXTS[0], max_tokens=4, ignore_eos=True).token_ids == expected
        assert engine.stats().is_plain
