"""What files of this project say of themselves, read without their tensors and without torch."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from hetero_runtime.checkpoint.safetensors_file import read_header
from hetero_runtime.errors import CheckpointError


class Metadata(NamedTuple):
    """`words`: a safetensors file's metadata. `names`: of its tensors, which have `num_bytes` in all."""

    words: dict[str, str]
    names: frozenset[str]
    num_bytes: int


def read_metadata(path: Path, file_format: str, *, remedy: str) -> Metadata:
    """Raises CheckpointError, with the `remedy`, for a file that is missing, cut short or of another kind."""
    entries = read_header(path)  # missing or truncated: it says so
    try:
        with safe_open(path, "numpy") as file:
            words = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); {remedy}") from error
    found = words.get("format")
    if found != file_format:
        raise CheckpointError(f"{path}: format is {found!r}, this version reads {file_format!r}; {remedy}")
    names = frozenset(entry.key for entry in entries)
    return Metadata(words, names, sum(entry.num_bytes for entry in entries))
