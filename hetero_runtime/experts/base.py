"""The contract of an expert store: all routed experts of a model, wherever their bytes are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from hetero_runtime.experts.formats import WeightForm, materialize
from hetero_runtime.experts.record import RecordLayout
from hetero_runtime.experts.table import RecordTable
from hetero_runtime.tiers.base import RecordSource

if TYPE_CHECKING:
    from hetero_gpu.packed import PackedLayout


class ExpertStore(ABC):
    """One record for each routed expert. Records never change, so any number of threads may read them.

    `source`: where records are read one at a time; None where all lie in host memory and copies take them
    from there. `packing`: how they are packed there; None: plain, as `layout` says. `errors`: root mean
    square error of each layer's weights over that of the weights; None where they are the checkpoint's.
    """

    def __init__(
        self,
        table: RecordTable,
        *,
        source: RecordSource | None,
        packing: PackedLayout | None = None,
        errors: list[float] | None = None,
    ) -> None:
        self.table, self.source, self.packing, self.errors = table, source, packing, errors
        self.layout: RecordLayout = table.layout
        self.forms: dict[str, WeightForm] = table.forms
        self.num_layers, self.num_experts = table.num_layers, table.num_experts

    @property
    @abstractmethod
    def bank_bytes(self) -> int:
        """Bytes of host memory that all records together take, swapped out or not."""

    @property
    def stored_bytes(self) -> int:
        """Bytes that one record takes where it lies."""
        return self.layout.record_bytes if self.packing is None else self.packing.packed_bytes

    def materialize(self, record: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Parameters of the expert whose plain record this is (a slab), in `dtype`."""
        return materialize(self.layout.view(record), self.forms, dtype)

    @abstractmethod
    def close(self) -> None:
        """Give memory and files back. Nothing reads a record after that."""
