"""A tiny checkpoint's experts in a file, and the bytes that its records ought to have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hetero_runtime.config import ResolvedConfig, load_config
from hetero_runtime.expert_file import ExpertFile
from hetero_runtime.expert_file.pack import PackResult, pack
from hetero_runtime.expert_file.stored import page_aligned
from hetero_runtime.planned import decide

Bytes = npt.NDArray[np.uint8]


def config_of(folder: Path, *overrides: str) -> ResolvedConfig:
    """What `hetero-runtime pack FOLDER --set ...` packs by."""
    settings = ("device=cpu", f"model.path={folder}", *overrides)
    return decide(load_config(None, overrides=settings)).config


def pack_to(folder: Path, out: Path, *overrides: str, **options: Any) -> PackResult:
    """Pack `folder` to `out`."""
    return pack(config_of(folder, *overrides), out, **options)


def records_of(file: ExpertFile) -> Bytes:
    """All records, checked, in the order of their rows: uint8 `[num_records, record_bytes]`."""
    rows = page_aligned(file.table.num_records, file.table.layout.record_bytes)
    for row in range(file.table.num_records):
        file.read(file.table.key(row), rows[row])
    return rows


def flip(path: Path, offset: int) -> None:
    """Change one bit of the byte at `offset`."""
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 4]))
