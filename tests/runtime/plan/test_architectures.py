"""What the plan reads from headers against what transformers and the store really make of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetero_runtime.plan import read_geometry
from tests import architectures
from tests.deepseek_vl2_checkpoints import VARIANTS, build_deepseek_vl2

LENGTH = 100


def _cache_bytes(value: Any, seen: dict[int, int]) -> int:
    """Bytes of all tensors below `value`, each storage once (`seen`: address -> bytes)."""
    import torch

    if isinstance(value, torch.Tensor):
        if value.numel() > 1:
            seen[value.data_ptr()] = value.numel() * value.element_size()
    elif isinstance(value, dict):
        for item in value.values():
            _cache_bytes(item, seen)
    elif isinstance(value, list | tuple):
        for item in value:
            _cache_bytes(item, seen)
    elif hasattr(value, "__dict__"):
        _cache_bytes(vars(value), seen)
    return sum(seen.values())


@pytest.mark.parametrize("name", architectures.ARCHITECTURES)
def test_the_cache_takes_what_the_plan_says(name: str, tmp_path: Path) -> None:
    folder = architectures.build_checkpoint(name, tmp_path)
    _assert_cache_is_planned(folder, architectures.reference_model(folder))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_cache_of_deepseek_vl2(variant: str, tmp_path: Path) -> None:
    import torch

    from hetero_runtime.hf.reference import load_reference

    folder = build_deepseek_vl2(variant, tmp_path)
    _assert_cache_is_planned(folder, load_reference(folder, dtype="float32", device=torch.device("cpu")))


def _assert_cache_is_planned(folder: Path, model: Any) -> None:
    import torch

    planned = read_geometry(folder).kv.row_bytes(LENGTH, itemsize=4)
    with torch.no_grad():
        output = model(input_ids=architectures.prompt_ids(LENGTH), use_cache=True)
    real = _cache_bytes(output.past_key_values.layers, {})
    assert real <= planned <= 1.5 * real
