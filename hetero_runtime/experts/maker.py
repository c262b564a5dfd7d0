"""Records made one at a time, in any order: what fills a bank of another format, or an expert file.

checkpoint ──reads of one expert──► workspace, one plain record a thread ──encode──► where it is wanted
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from hetero_runtime.experts.bank import HostBank
from hetero_runtime.experts.extent_reader import ExtentReader, PathChoice, read_extent
from hetero_runtime.experts.oracle import check_expert
from hetero_runtime.experts.quantize import Quantizer
from hetero_runtime.experts.reads import EXTENT_BYTES, group_reads, longest_of
from hetero_runtime.experts.sources import ExpertPlan
from hetero_scheduler.keys import ExpertKey

Bytes = npt.NDArray[np.uint8]
Squares = npt.NDArray[np.float64]


class RecordMaker:
    """Makes records of a checkpoint as `table` says, `workers` at once. The workspace goes with `close`."""

    def __init__(self, plan: ExpertPlan, quantizer: Quantizer | None, *, workers: int) -> None:
        """`quantizer`: what changes the records; None copies them."""
        self.table = plan.table if quantizer is None else quantizer.table
        self._quantizer = quantizer
        self._plan, self._record_bytes = plan, plan.layout.record_bytes
        self._workspace = HostBank(workers * self._record_bytes)
        extents = group_reads(plan.reads_of(ExpertKey(0, 0), start=0))
        longest = max(EXTENT_BYTES, longest_of(extents))  # gaps inside an extent differ between experts
        self._reader = ExtentReader(self._workspace.bytes, scratch_bytes=longest)
        self._choice = PathChoice.among(self.table.num_records * len(extents), threads=workers)

    def make(self, key: ExpertKey, into: Bytes, *, worker: int) -> Squares:
        """Write `key`'s record to `into`, uint8 `[record_bytes]`.

        `worker`: whose part of the workspace to use. Returns the sums of squared errors and of squared
        weights, float64 `[2]`; zeros where nothing is changed. Raises CheckpointError.
        """
        plain = self._read(key, worker)
        if self._quantizer is not None:
            return self._quantizer.write(key, plain, into)
        np.copyto(into, plain.numpy())
        return np.zeros(2)

    def check_source(self) -> None:
        """Raise CheckpointError unless the last expert, as it is read, is what transformers makes of it."""
        key = ExpertKey(self.table.num_layers - 1, self.table.num_experts - 1)
        check_expert(self._plan, key, self._plan.layout.view(self._read(key, 0)))

    def close(self) -> None:
        """Close the files and free the workspace. No record may be in the making."""
        self._reader.close()
        self._workspace.close()

    def _read(self, key: ExpertKey, worker: int) -> torch.Tensor:
        """The record as the checkpoint has it, in the worker's part of the workspace."""
        start = worker * self._record_bytes
        for extent in group_reads(self._plan.reads_of(key, start=start)):
            read_extent(self._reader, extent, self._choice)
        return self._workspace.bytes[start : start + self._record_bytes]
