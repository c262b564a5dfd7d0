"""Where the expert file of a configuration lies."""

from __future__ import annotations

from pathlib import Path

from hetero_runtime.beside_model import named_or_beside
from hetero_runtime.config.tree import Config
from hetero_runtime.errors import CheckpointError, ConfigError
from hetero_runtime.expert_file.header import read_expert_header
from hetero_runtime.plan.geometry import Geometry

EXPERTS_SUFFIX = ".experts.safetensors"


def locate_expert_file(config: Config, geometry: Geometry) -> Path | None:
    """The file that `config` means; None where experts come from the checkpoint. `geometry`: with experts as
    in `model.experts`.

    `expert_file: auto` is the checkpoint for backings that load all experts. For those that read while they
    serve it is the file beside the model's folder, named like it: `model.experts.safetensors` is of `model/`.
    Raises ConfigError when there is none, CheckpointError for a file that is damaged, or whose records are
    not of this model's size.
    """
    memory, experts = config.memory, config.model.experts
    if memory.expert_file == "auto" and memory.backing not in ("direct", "mmap"):
        return None
    path = named_or_beside(memory.expert_file, geometry.path, EXPERTS_SUFFIX)
    if not path.exists():
        raise ConfigError(
            f"memory.backing: {memory.backing}, memory.expert_file: {memory.expert_file}: {path} does not "
            f"exist; write it once with `hetero-runtime pack {geometry.path} --out {path}`, name another in "
            "memory.expert_file, or write memory.backing: ram and leave memory.expert_file out"
        )
    header = read_expert_header(path)
    if header.experts != experts:
        raise ConfigError(
            f"{path}: was packed with model.experts: {header.experts}, and here it is {experts}; write "
            f"model.experts: {header.experts}"
        )
    found = header.num_layers, header.num_experts, header.record_bytes
    expected = geometry.num_moe_layers, geometry.num_experts, geometry.record_bytes
    if found != expected:
        raise CheckpointError(
            f"{path}: holds {found[0]} layers × {found[1]} experts of {found[2]:,} bytes; {geometry.path} "
            f"has {expected[0]} × {expected[1]} of {expected[2]:,}; it was packed from another model"
        )
    return path
