"""The table of a model's records: how many there are, in which order, and what each holds."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_runtime.experts.formats import WeightForm
from hetero_runtime.experts.record import RecordLayout
from hetero_scheduler.keys import ExpertKey


@dataclass(frozen=True)
class RecordTable:
    """One record for each routed expert, layer by layer. All share `layout` and `forms` (by parameter)."""

    num_layers: int
    num_experts: int
    """Of each layer."""
    layout: RecordLayout
    forms: dict[str, WeightForm]

    @property
    def num_records(self) -> int:
        """Records of all layers."""
        return self.num_layers * self.num_experts

    @property
    def num_bytes(self) -> int:
        """Bytes of all records."""
        return self.num_records * self.layout.record_bytes

    def row(self, key: ExpertKey) -> int:
        """The number of `key`'s record: rows count the experts of layer 0 first."""
        assert key.layer in range(self.num_layers), f"no layer for {key}"
        assert key.expert in range(self.num_experts), f"no expert for {key}"
        return key.layer * self.num_experts + key.expert

    def key(self, row: int) -> ExpertKey:
        """Whose record has the number `row`."""
        assert row in range(self.num_records), f"row {row} of {self.num_records}"
        return ExpertKey(*divmod(row, self.num_experts))
