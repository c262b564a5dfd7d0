"""One small checkpoint, and its expert file, for the tests that only read them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.architectures import build_checkpoint
from tests.runtime.expert_file.packing import pack_to


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers of 16 bf16 experts, in three shards."""
    return build_checkpoint("Qwen3Moe", tmp_path_factory.mktemp("model"), dtype=torch.bfloat16)


@pytest.fixture(scope="session")
def packed(folder: Path) -> Path:
    """Its expert file; not to be changed."""
    out = folder.parent / "packed.experts"
    pack_to(folder, out)
    return out


@pytest.fixture
def own(packed: Path, tmp_path: Path) -> Path:
    """A copy of the expert file, to be damaged."""
    return Path(shutil.copy(packed, tmp_path / "own.experts"))
