"""Tensors that are read when they are indexed: what transformers' loader takes in place of a slice.

Used for the backbone only. Routed experts are read by `experts.store`, which never maps a file: mapped
pages count as the process's own memory. They lie between the tensors of the backbone, so the kernel is told
which bytes come next, and to read nothing ahead on its own.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from hetero_runtime.checkpoint.safetensors_file import TensorEntry
from hetero_runtime.errors import CheckpointError

TORCH_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16, "I16": torch.int16, "F16": torch.float16, "BF16": torch.bfloat16,
    "U32": torch.uint32, "I32": torch.int32, "F32": torch.float32,
    "U64": torch.uint64, "I64": torch.int64, "F64": torch.float64,
}  # fmt: skip
"""safetensors dtype name to torch dtype."""

DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
"""torch dtype to its name in safetensors."""


class LazyTensor:
    """One tensor of a mapped file, with the three methods of a safetensors slice.

    Indexing returns a tensor of its own, so a file that changes later changes no weight.
    """

    def __init__(self, entry: TensorEntry, mapping: mmap.mmap) -> None:
        self.entry = entry
        self._mapping = mapping

    def __getitem__(self, index: Any) -> torch.Tensor:
        dtype = TORCH_DTYPES[self.entry.dtype]
        if self.entry.num_bytes == 0:
            return torch.empty(self.entry.shape, dtype=dtype)[index]
        self._advise(mmap.MADV_WILLNEED)  # all of it at once
        raw = torch.frombuffer(
            self._mapping, dtype=torch.uint8, count=self.entry.num_bytes, offset=self.entry.offset
        )
        if self.entry.offset % dtype.itemsize:
            raw = raw.clone()  # a header of odd length: torch wants elements at multiples of their size
        own = raw.view(dtype).view(self.entry.shape)[index].clone()
        self._advise(mmap.MADV_DONTNEED)  # else its pages count as ours until the last tensor of the file
        return own

    def _advise(self, advice: int) -> None:
        begin = self.entry.offset // mmap.PAGESIZE * mmap.PAGESIZE
        end = self.entry.offset + self.entry.num_bytes
        self._mapping.madvise(advice, begin, end - begin)

    def get_shape(self) -> list[int]:
        """Shape in elements."""
        return list(self.entry.shape)

    def get_dtype(self) -> str:
        """The safetensors name of the dtype, such as `BF16`."""
        return self.entry.dtype


def map_tensors(entries: Iterable[TensorEntry]) -> dict[str, LazyTensor]:
    """Lazy tensors by key. Each file is mapped once, privately; it is unmapped with its last tensor.

    Raises CheckpointError when a file cannot be opened.
    """
    mappings: dict[Path, mmap.mmap] = {}
    tensors = {}
    for entry in entries:
        if entry.file not in mappings:
            mappings[entry.file] = _map(entry.file)
        tensors[entry.key] = LazyTensor(entry, mappings[entry.file])
    return tensors


def _map(path: Path) -> mmap.mmap:
    """A private mapping. Copy-on-write only because torch asks for writable memory; nobody writes to it."""
    try:
        with path.open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        mapping.madvise(mmap.MADV_RANDOM)
        return mapping
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be mapped ({error.strerror}); check the path and its rights"
        ) from error
