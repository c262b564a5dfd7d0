"""The forecast's kernel compiles for GPUs that are not here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.absent_gpu import assert_compiles

pytest.importorskip("triton")

FORECAST = """
from hetero_gpu.predict import DevicePredictor
from hetero_scheduler.predict.mamba2_block import Mamba2Sizes
from hetero_scheduler.predict.mamba2_model import GroupModel, GroupShape

model = GroupModel(GroupShape(24, 128, 8, sizes=Mamba2Sizes(96, 32, 32)))
dtype = torch.{dtype}
predictor = DevicePredictor([model], torch.ones(2, dtype=torch.bool), weight_dtype=dtype, logits_dtype=dtype)
predictor.observe(23, predictor.router_logits[23])
"""


@pytest.mark.parametrize(("capability", "dtype"), [(87, "bfloat16"), (90, "float32")], ids=["orin", "h200"])
def test_the_kernel_compiles(capability: int, dtype: str, tmp_path: Path) -> None:
    assert_compiles(FORECAST.format(dtype=dtype), capability, tmp_path)
