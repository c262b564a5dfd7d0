"""A model folder: its config.json and every tensor of its safetensors files, by name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero_runtime.checkpoint.safetensors_file import TensorEntry, read_header
from hetero_runtime.errors import CheckpointError

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True)
class Checkpoint:
    """What a folder holds. Opening reads headers only; the weights stay on disk."""

    path: Path
    config: dict[str, Any]
    entries: dict[str, TensorEntry]

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Open a folder with `config.json` and one `*.safetensors` file, or many and an index.

        Raises CheckpointError when the folder, its config, a shard or a tensor is missing or malformed.
        """
        path = Path(path)
        if not path.is_dir():
            raise CheckpointError(f"{path}: no such folder; model.path must name a Hugging Face model folder")
        config = _read_json_object(path / CONFIG_NAME)
        index = path / INDEX_NAME
        entries = _sharded(index) if index.exists() else _unsharded(path)
        return cls(path, config, entries)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.num_bytes for entry in self.entries.values())


def _sharded(index: Path) -> dict[str, TensorEntry]:
    weight_map = _read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index}: has no weight_map from tensor to file; download the index again")
    shards = sorted(set(weight_map.values()))
    missing = [name for name in shards if not (index.parent / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{index.parent}: {len(missing)} of {len(shards)} shards that {index.name} lists are missing: "
            f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}; download them"
        )
    found = {entry.key: entry for name in shards for entry in read_header(index.parent / name)}
    for key, name in weight_map.items():
        if key not in found or found[key].file.name != Path(name).name:
            raise CheckpointError(f"{index.parent / name}: has no {key!r}, which {index.name} says it holds")
    return {key: found[key] for key in weight_map}


def _unsharded(path: Path) -> dict[str, TensorEntry]:
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{path}: holds no *.safetensors file; only safetensors is read (never pickle), convert the model"
        )
    entries: dict[str, TensorEntry] = {}
    for file in files:
        for entry in read_header(file):
            if entry.key in entries:
                raise CheckpointError(
                    f"{path}: {entry.key!r} is in both {entries[entry.key].file.name} and {file.name}, "
                    f"and there is no {INDEX_NAME} to choose; remove one of the files"
                )
            entries[entry.key] = entry
    return entries


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}); is this a model folder?"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path}: is not JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: is not a JSON object; download it again")
    return value
