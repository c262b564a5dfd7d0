"""The header of one safetensors file, without torch: what it holds and where.

    file     |8 bytes: N, little endian|N bytes of JSON|data ...                       |
    JSON     {"name": {"dtype": "BF16", "shape": [4, 8], "data_offsets": [begin, end]}, ...}

Offsets count from the first byte of data. Format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from hetero_runtime.errors import CheckpointError

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
"""Bytes an element of each safetensors dtype that we read."""

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The limit of the reference implementation: a larger number is garbage, not a header."""

_DOWNLOAD_AGAIN = "download or copy the file again"


@dataclass(frozen=True)
class TensorEntry:
    """One tensor on disk: `num_bytes` bytes at byte `offset` of `file` (counted from the file's start)."""

    key: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def read_header(path: str | Path) -> list[TensorEntry]:
    """All tensors of one file in the order of their bytes. Reads the header only.

    Raises CheckpointError when the file is missing, truncated, or its header does not describe it.
    """
    path = Path(path)
    header, data_start, file_bytes = _read_json(path)
    header.pop("__metadata__", None)
    entries = [_entry(path, key, raw, data_start, file_bytes) for key, raw in header.items()]
    entries.sort(key=lambda entry: entry.offset)
    _check_no_overlap(entries)
    return entries


def read_metadata(path: str | Path) -> dict[str, str]:
    """The texts that a file carries beside its tensors, by name. Raises CheckpointError as `read_header`."""
    metadata = _read_json(Path(path))[0].get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise CheckpointError(f"{path}: the metadata of its header are no texts; {_DOWNLOAD_AGAIN}")
    return metadata


def _read_json(path: Path) -> tuple[dict[str, Any], int, int]:
    """The parsed header, the file offset of its data, and the size of the file in bytes."""
    try:
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if file_bytes < LENGTH_BYTES or LENGTH_BYTES + length > file_bytes or length > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path}: not a safetensors file, or truncated: it has {file_bytes} bytes and its header "
                    f"claims {length}; {_DOWNLOAD_AGAIN}"
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}); check the path and its rights"
        ) from error
    try:
        header = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{path}: the header is not JSON ({error}); {_DOWNLOAD_AGAIN}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is not a JSON object; {_DOWNLOAD_AGAIN}")
    return header, LENGTH_BYTES + length, file_bytes


def _entry(path: Path, key: str, raw: Any, data_start: int, file_bytes: int) -> TensorEntry:
    try:
        dtype, shape = str(raw["dtype"]), tuple(int(n) for n in raw["shape"])
        begin, end = (int(n) for n in raw["data_offsets"])
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: entry {key!r} is malformed ({raw!r}); {_DOWNLOAD_AGAIN}") from error
    if dtype not in DTYPE_BYTES:
        raise CheckpointError(
            f"{path}: {key!r} has dtype {dtype}, which is not one of {', '.join(DTYPE_BYTES)}; "
            f"save the checkpoint in one of these"
        )
    expected = math.prod(shape) * DTYPE_BYTES[dtype]
    if min((0, begin, *shape)) < 0 or end - begin != expected:
        raise CheckpointError(
            f"{path}: {key!r} {dtype}{list(shape)} takes {expected} bytes but its offsets are "
            f"{begin}..{end}; {_DOWNLOAD_AGAIN}"
        )
    if data_start + end > file_bytes:
        raise CheckpointError(
            f"{path}: truncated: {key!r} ends at byte {data_start + end} of a file of {file_bytes} bytes; "
            f"{_DOWNLOAD_AGAIN}"
        )
    return TensorEntry(key, path, dtype, shape, data_start + begin, expected)


def _check_no_overlap(entries: list[TensorEntry]) -> None:
    for before, after in pairwise(entries):
        if before.offset + before.num_bytes > after.offset:
            raise CheckpointError(
                f"{after.file}: {before.key!r} ends at byte {before.offset + before.num_bytes} but "
                f"{after.key!r} begins at {after.offset}: their bytes overlap; {_DOWNLOAD_AGAIN}"
            )
