"""A block drafter as a folder: config.json and the tensors of the network, in safetensors."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from hetero_runtime.checkpoint import Checkpoint
from hetero_runtime.checkpoint.checkpoint import CONFIG_NAME
from hetero_runtime.errors import CheckpointError
from hetero_runtime.speculation.block.network import BlockNetwork
from hetero_runtime.speculation.block.shape import as_config, read_shape

_WEIGHTS_NAME = "model.safetensors"


def read_network(folder: Path, *, dtype: torch.dtype, device: torch.device) -> BlockNetwork:
    """The network in `folder`, on `device`, its weights in `dtype`.

    Raises CheckpointError for a folder that holds no block drafter of a kind that is known.
    """
    checkpoint = Checkpoint.open(folder)
    shape = read_shape(folder, checkpoint.config)
    with torch.device("meta"):
        network = BlockNetwork(shape)
    wanted = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    found = {name: tuple(entry.shape) for name, entry in checkpoint.entries.items()}
    if wanted != found:
        differing = sorted(
            name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)
        )
        name = differing[0]
        raise CheckpointError(
            f"{folder}: {len(differing)} tensors are not those of the block drafter that config.json "
            f"describes, first {name}: {found.get(name, 'missing')}, wanted {wanted.get(name, 'none')}; "
            "download the checkpoint again"
        )
    for file in sorted({entry.file for entry in checkpoint.entries.values()}):
        tensors = load_file(file, device=str(device))
        network.load_state_dict(
            {name: tensor.to(dtype) for name, tensor in tensors.items()}, strict=False, assign=True
        )
    return network.eval().requires_grad_(False)


def write_network(network: BlockNetwork, folder: Path, *, vocab_size: int) -> None:
    """Write what `read_network` reads, in bfloat16. `vocab_size`: of the target."""
    folder.mkdir(parents=True, exist_ok=True)
    config = as_config(network.shape, vocab_size=vocab_size)
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in network.state_dict().items()
    }
    save_file(tensors, folder / _WEIGHTS_NAME, metadata={"format": "pt"})
