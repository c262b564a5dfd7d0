"""The record: all weights of one expert in one contiguous run of bytes.

    record   |gate_up_proj        |pad|gate_up_proj.scale|pad|down_proj   |pad|... |pad to a page|
    offset    0                        ^ multiple of FIELD_ALIGN                   record_bytes

A record is what moves: one copy brings one expert. Slabs hold records byte for byte as the checkpoint has
them (quantised ones too). The host bank holds the same bytes, or bf16 records packed (`packing`): then they
are decoded on their way to a slab.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

FIELD_ALIGN = 128
RECORD_ALIGN = 4096
"""One page: direct reads and CUDA registration then address whole pages."""


def field_stride(num_bytes: int) -> int:
    """Bytes from the start of a field of `num_bytes` to that of the next."""
    return -(-num_bytes // FIELD_ALIGN) * FIELD_ALIGN


def record_size(field_bytes: Iterable[int]) -> int:
    """Bytes of a record with fields of these sizes, in whole pages."""
    return -(-sum(map(field_stride, field_bytes)) // RECORD_ALIGN) * RECORD_ALIGN


@dataclass(frozen=True)
class Field:
    """One tensor of a record: `shape` in elements of `dtype`, at `offset` bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class RecordLayout:
    """Fields of one record. All experts of a model share one layout."""

    fields: tuple[Field, ...]
    record_bytes: int

    @classmethod
    def of(cls, tensors: list[tuple[str, torch.dtype, tuple[int, ...]]]) -> RecordLayout:
        """Lay (name, dtype, shape) triples one after another, aligned."""
        fields, offset = [], 0
        for name, dtype, shape in tensors:
            field = Field(name, dtype, tuple(shape), offset)
            fields.append(field)
            offset += field_stride(field.num_bytes)
        return cls(tuple(fields), record_size(field.num_bytes for field in fields))

    def view(self, record: torch.Tensor) -> dict[str, torch.Tensor]:
        """Typed views of one record. `record`: uint8 `[record_bytes]`, contiguous, any device."""
        return {
            f.name: record[f.offset : f.offset + f.num_bytes].view(f.dtype).view(f.shape) for f in self.fields
        }
