"""The bundled model with experts as large as one likes, saying the same: real routing over many bytes.

Every expert gets more inner rows: gate and up drawn at random, down so small (1e-30) that what they add is
lost in rounding. So routers, text and the trained predictor stay those of the bundled model, while a record
takes megabytes that no kernel can skip and no disk can shorten.
"""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from hetero_runtime.beside_model import beside
from hetero_runtime.bundled import model_path
from hetero_runtime.plan import read_geometry
from hetero_runtime.prediction import read_predictor
from hetero_runtime.prediction.file import write_predictor
from hetero_runtime.prediction.fingerprint import RouterFingerprint
from hetero_runtime.prediction.locate import PREDICTOR_SUFFIX

TINY = 1e-30
"""Far below what a bfloat16 sum of ordinary numbers can see, far above its smallest number."""


def write_widened(folder: Path, factor: int) -> Path:
    """Write the bundled model to `folder`, its experts `factor` times as wide, its predictor beside it.

    The same factor gives the same bytes.
    """
    source = model_path()
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.md"))
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    width = config["moe_intermediate_size"] * factor
    config["moe_intermediate_size"] = width
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn(width * config["hidden_size"] * 2, generator=draw).to(torch.bfloat16)
    for shard in sorted(source.glob("*.safetensors")):
        tensors = load_file(shard)
        widened = {name: _widened(name, tensor, width, noise) for name, tensor in tensors.items()}
        save_file(widened, folder / shard.name, metadata={"format": "pt"})
    trained = read_predictor(beside(source, PREDICTOR_SUFFIX))
    fingerprint = RouterFingerprint.of_model(read_geometry(folder))
    write_predictor(
        beside(folder, PREDICTOR_SUFFIX), trained.models, fingerprint=fingerprint, notes=trained.notes
    )
    return folder


def _widened(name: str, tensor: torch.Tensor, width: int, noise: torch.Tensor) -> torch.Tensor:
    if ".experts." not in name:
        return tensor
    rows, columns = tensor.shape
    is_down = name.endswith("down_proj.weight")
    shape = (rows, width - columns) if is_down else (width - rows, columns)
    begin = zlib.crc32(name.encode()) % (
        noise.numel() // 2
    )  # no two tensors hold the same numbers in the same place
    padding = noise[begin : begin + shape[0] * shape[1]].view(shape)
    return torch.cat([tensor, padding * TINY if is_down else padding * 0.05], dim=1 if is_down else 0)
