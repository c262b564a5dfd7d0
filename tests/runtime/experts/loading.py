"""From a tiny checkpoint on disk to its split tensors and its store, as the engine does it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from hetero_runtime.checkpoint import Checkpoint
from hetero_runtime.experts.extent_reader import ReadPath
from hetero_runtime.experts.store import BankStore, load_store
from hetero_runtime.hf.conversion import SplitCheckpoint, split_checkpoint
from hetero_runtime.hf.loading import build_skeleton

Tensors = dict[str, torch.Tensor]


def split(folder: Path) -> SplitCheckpoint:
    """The expert sources and the backbone of a folder."""
    checkpoint = Checkpoint.open(folder)
    skeleton = build_skeleton(checkpoint, dtype="float32", device=torch.device("cpu"))
    return split_checkpoint(skeleton.model, checkpoint, skeleton.quantizer)


def load(folder: Path, *, threads: int = 2, read_path: ReadPath | None = None) -> BankStore:
    """The store of a folder."""
    return load_store(split(folder).experts, threads=threads, read_path=read_path)


def rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """Change the tensors of a folder with one safetensors file."""
    file = folder / "model.safetensors"
    save_file({name: t.contiguous() for name, t in change(load_file(file)).items()}, file, {"format": "pt"})
    return folder
