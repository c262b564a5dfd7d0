"""The self-check must be able to fail: a changed weight is found, and said where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetero_gpu.experts.decode import DecodeExperts
from hetero_runtime.config import load_config
from hetero_runtime.errors import BudgetError, CheckpointError, ConfigError
from hetero_runtime.experts.base import ExpertStore
from hetero_runtime.in_place import Done, Work
from hetero_runtime.in_place.torch_loop import TorchExperts
from hetero_runtime.planned import Planned, plan_for
from hetero_runtime.verify import verify
from hetero_runtime.verify.comparison import GreedyRun, first_difference, logit_errors
from tests.architectures import build_checkpoint
from tests.runtime.steps_on_cpu import steps_on_cpu


@pytest.fixture
def planned(tmp_path: Path) -> Planned:
    folder = build_checkpoint("Olmoe", tmp_path)
    return plan_for(
        load_config({"model": {"path": str(folder)}, "device": "cpu", "execution": {"max_length": 256}})
    )


def test_an_honest_engine_is_equal_in_every_bit(planned: Planned) -> None:
    (result,) = verify([planned], max_tokens=8)
    assert result.tokens_equal
    assert result.is_bit_equal
    assert result.first_difference is None


def test_a_changed_expert_is_found_and_located(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    materialize = ExpertStore.materialize

    def distorted(self: ExpertStore, record: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        params = materialize(self, record, dtype)
        return {name: tensor * 1.5 for name, tensor in params.items()}

    monkeypatch.setattr(ExpertStore, "materialize", distorted)
    (result,) = verify([planned], max_tokens=8)
    assert result.max_logit_error > 1e-3
    assert not result.is_bit_equal
    assert result.first_difference is not None
    assert result.first_difference.layer.endswith("layers.0")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter stands in where there is no GPU")
def test_captured_steps_are_what_is_verified_where_they_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps_on_cpu(monkeypatch)
    planned = _captured(tmp_path)
    (result,) = verify([planned], prompts=["Once upon"], max_tokens=6)
    assert (result.mode, result.to_json()["mode"]) == ("graph", "graph")
    assert result.tokens_equal
    assert result.agrees
    assert 0 < result.typical_logit_error < result.tolerance * result.max_logit
    assert result.first_difference is None
    assert 0 < result.hit_rate < 1

    compute = DecodeExperts.__call__

    def wrong(self: DecodeExperts, *arguments: Any, out: torch.Tensor, **named: Any) -> None:
        compute(self, *arguments, out=out, **named)
        out.mul_(1.5)

    monkeypatch.setattr(DecodeExperts, "__call__", wrong)
    (result,) = verify([planned], prompts=["Once upon"], max_tokens=6)
    assert not result.agrees


def _captured(tmp_path: Path) -> Planned:
    return _planned(tmp_path, execution={"mode": "graph", "max_rows": 1, "max_length": 128})


def _in_place(tmp_path: Path) -> Planned:
    given = {"misses": {"handler": "cpu"}, "cpu": {"backend": "torch"}}
    return _planned(tmp_path, **given, execution={"max_length": 256})


def _planned(tmp_path: Path, **sections: dict[str, Any]) -> Planned:
    folder = build_checkpoint("Qwen3Moe", tmp_path)
    given = {"model": {"path": str(folder)}, "device": "cpu", "memory": {"residency": 0.25}}
    return plan_for(load_config({**given, **sections}))


def test_experts_on_the_cpu_agree_up_to_rounding(tmp_path: Path) -> None:
    (result,) = verify([_in_place(tmp_path)], max_tokens=8)
    assert result.agrees
    assert not result.is_bit_equal
    assert 0 < result.typical_logit_error < result.tolerance * result.max_logit


def test_experts_wrong_on_the_cpu_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = TorchExperts._compute

    def distorted(self: TorchExperts, work: Work) -> Done:
        done = compute(self, work)
        return Done(done.total * np.float32(1.01), done.seconds)

    monkeypatch.setattr(TorchExperts, "_compute", distorted)
    (result,) = verify([_in_place(tmp_path)], max_tokens=8)
    assert not result.agrees


def test_what_transformers_cannot_load_is_said_and_not_compared(tmp_path: Path) -> None:
    folder = build_checkpoint("Qwen3MoeFp8Ragged", tmp_path)
    ragged = plan_for(
        load_config({"model": {"path": str(folder)}, "device": "cpu", "execution": {"max_length": 256}})
    )
    with pytest.raises(CheckpointError, match="nothing to compare with"):
        verify([ragged], max_tokens=2)


def test_logit_errors_stop_where_the_texts_part() -> None:
    ours = GreedyRun(
        (1, 2, 3), (torch.tensor([0.0, 1.0]), torch.tensor([0.0, 2.0]), torch.tensor([9.0, 9.0]))
    )
    theirs = GreedyRun(
        (1, 7, 3), (torch.tensor([0.0, 1.5]), torch.tensor([0.0, 2.25]), torch.tensor([0.0, 0.0]))
    )
    assert logit_errors(ours, theirs) == [0.5, 0.25]


def test_first_difference_names_the_first_layer_in_order() -> None:
    same, other = torch.zeros(2, 3), torch.full((2, 3), 0.25)
    found = first_difference([{"a": same, "b": other}], [{"a": same, "b": same}])
    assert found is not None
    assert (found.layer, found.max_error) == ("b", 0.25)
    assert first_difference([{"a": same}], [{"a": same}]) is None


def test_a_reference_that_does_not_fit_is_refused_before_loading(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetero_runtime.plan.budget.Budgets.limit", lambda self, tier: 1000)
    with pytest.raises(BudgetError, match="all resident"):
        verify([planned], max_tokens=8)


def test_quantised_experts_are_another_model() -> None:
    other = plan_for(load_config({"device": "cpu", "model": {"experts": "int8"}}))
    with pytest.raises(
        ConfigError, match=r"model\.experts: int8 changes the weights.*eval kl --set model\.exp"
    ):
        verify([other], max_tokens=8)
