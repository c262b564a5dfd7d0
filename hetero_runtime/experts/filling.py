"""What fills a host bank: the checkpoint as it is, or the checkpoint in another format.

as it is         large sequential reads, straight to where the bytes belong
another format   record by record, through a workspace of a few plain records: never a bank of those
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
import torch

from hetero_runtime.experts.bank import Bank
from hetero_runtime.experts.encodings import WORKERS_A_THREAD
from hetero_runtime.experts.extent_reader import ExtentReader, PathChoice, ReadPath, read_extent
from hetero_runtime.experts.in_parallel import run_all
from hetero_runtime.experts.maker import RecordMaker
from hetero_runtime.experts.oracle import check_expert
from hetero_runtime.experts.quantize import Quantizer, errors_by_layer
from hetero_runtime.experts.reads import group_reads, longest_of
from hetero_runtime.experts.sources import ExpertPlan
from hetero_runtime.experts.table import RecordTable
from hetero_scheduler.keys import ExpertKey

Plain = Callable[[ExpertKey], torch.Tensor]
"""A key's record as a slab has it: uint8 `[record_bytes]`."""


class Filling(ABC):
    """One way to fill a bank with the records of `table`. Used once.

    `read_bytes`: what `fill` will have read. `errors`: relative error of the weights by layer, once the bank
    is full; None where they are those of the checkpoint.
    """

    table: RecordTable
    read_bytes: int
    errors: list[float] | None = None

    @abstractmethod
    def fill(self, bank: Bank, *, threads: int, read: Callable[[int], None]) -> None:
        """Write every record where its row is. `read` is called with bytes more that are read.

        Raises CheckpointError.
        """

    @abstractmethod
    def check(self, plain: Plain) -> None:
        """The bank is complete: hold one expert to what transformers makes of it. Raises CheckpointError."""


class CheckpointFilling(Filling):
    """The bytes of the checkpoint. `read_path`: None measures and chooses."""

    def __init__(self, plan: ExpertPlan, read_path: ReadPath | None = None) -> None:
        self.table, self._plan, self._read_path = plan.table, plan, read_path
        self._extents = group_reads(plan.reads())
        self.read_bytes = sum(extent.num_bytes for extent in self._extents)

    def fill(self, bank: Bank, *, threads: int, read: Callable[[int], None]) -> None:
        choice = PathChoice.among(len(self._extents), threads=threads, fixed=self._read_path)
        reader = ExtentReader(bank.bytes, scratch_bytes=longest_of(self._extents))
        try:
            run_all(
                lambda extent, _: read_extent(reader, extent, choice),
                self._extents,
                threads=threads,
                done=lambda extent: read(extent.num_bytes),
            )
        finally:
            reader.close()

    def check(self, plain: Plain) -> None:
        key = ExpertKey(self.table.num_layers - 1, self.table.num_experts - 1)
        check_expert(self._plan, key, self.table.layout.view(plain(key)))


class QuantizedFilling(Filling):
    """The checkpoint's experts as `quantizer` writes them."""

    def __init__(self, plan: ExpertPlan, quantizer: Quantizer) -> None:
        self.table, self._plan, self._quantizer = quantizer.table, plan, quantizer
        self.read_bytes = plan.table.num_bytes

    def fill(self, bank: Bank, *, threads: int, read: Callable[[int], None]) -> None:
        workers = WORKERS_A_THREAD * threads
        records = bank.bytes.numpy().reshape(self.table.num_records, -1)
        squares = np.zeros((self.table.num_records, 2))
        maker = RecordMaker(self._plan, self._quantizer, workers=workers)

        def make(row: int, worker: int) -> None:
            squares[row] = maker.make(self.table.key(row), records[row], worker=worker)

        try:
            maker.check_source()
            source_bytes = self._plan.layout.record_bytes
            run_all(make, range(len(records)), threads=workers, done=lambda row: read(source_bytes))
        finally:
            maker.close()
        self.errors = errors_by_layer(squares, self.table.num_layers)

    def check(self, plain: Plain) -> None:
        """`fill` has held the plain record of one to it, before it wrote any."""


def make_filling(plan: ExpertPlan, quantizer: Quantizer | None, read_path: ReadPath | None) -> Filling:
    """`quantizer`: what changes the records; None keeps them."""
    return CheckpointFilling(plan, read_path) if quantizer is None else QuantizedFilling(plan, quantizer)
