"""The model as transformers alone runs it: all weights resident, experts by its own eager loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hetero_runtime.checkpoint import Checkpoint
from hetero_runtime.errors import CheckpointError
from hetero_runtime.hf.architectures import architecture_of
from hetero_runtime.hf.loading import DTYPES, ask_to_dequantize, read_config


def load_reference(path: Path, *, dtype: str, device: torch.device) -> Any:
    """Plain `from_pretrained`, dequantised where the checkpoint is quantised. Needs room for every weight.

    Raises CheckpointError when transformers alone cannot load the checkpoint: then nothing can be compared.
    """
    architecture = architecture_of(Checkpoint.open(path).config)
    config = read_config(path)
    ask_to_dequantize(config)
    if architecture.is_text_part:
        config = config.get_text_config(decoder=True)
    model_class = architecture.load_class()
    try:
        model = model_class.from_pretrained(
            path,
            config=config,
            dtype=DTYPES[dtype],
            device_map={"": device},
            experts_implementation="eager",
            local_files_only=True,
        )
    except RuntimeError as error:
        if "automatic conversion of the weights" not in str(error):
            raise
        raise CheckpointError(
            f"{path}: transformers itself cannot load this checkpoint (it does not dequantise blocks that "
            "end short), so there is nothing to compare with"
        ) from error
    if device.type == "cpu":
        _align(model)
    return model.eval()


def _align(model: torch.nn.Module) -> None:
    """Move weights out of the mapped file into memory of torch's own.

    A tensor in a safetensors file begins at any multiple of 8 bytes, and MKL's matrix-vector product rounds
    differently on memory that is not aligned to a vector: the same weights would give other last bits.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
