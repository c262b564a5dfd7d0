"""The record: all weights of one expert in one contiguous run of bytes.

    record   |gate_up_proj        |pad|gate_up_proj.scale|pad|down_proj   |pad|... |pad to a page|
    offset    0                        ^ multiple of FIELD_ALIGN                   record_bytes

A record is what moves: one copy brings one expert. Host bank and slabs hold records byte for byte as
the checkpoint has them (quantised ones too), so a copy is a plain memcpy and no second form of the
weights exists.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

FIELD_ALIGN = 128
RECORD_ALIGN = 4096
"""One page: direct reads and CUDA registration then address whole pages."""


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
            offset += -(-field.num_bytes // FIELD_ALIGN) * FIELD_ALIGN
        return cls(tuple(fields), -(-offset // RECORD_ALIGN) * RECORD_ALIGN)

    def view(self, record: torch.Tensor) -> dict[str, torch.Tensor]:
        """Typed views of one record. `record`: uint8 `[record_bytes]`, contiguous, any device."""
        return {
            f.name: record[f.offset : f.offset + f.num_bytes].view(f.dtype).view(f.shape) for f in self.fields
        }
