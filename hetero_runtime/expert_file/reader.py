"""Reading an expert file: checked when it is opened, and record by record as they come."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import numpy as np

from hetero_runtime.checkpoint import Checkpoint
from hetero_runtime.checkpoint.lazy_tensor import DTYPE_NAMES, TORCH_DTYPES
from hetero_runtime.errors import CheckpointError
from hetero_runtime.expert_file.header import PACK_AGAIN, ExpertFileHeader, read_expert_header
from hetero_runtime.expert_file.source import check_sources
from hetero_runtime.expert_file.stored import Bytes, DirectFile, StoredRecords
from hetero_runtime.experts.formats import WeightForm
from hetero_runtime.experts.quantize import errors_by_layer
from hetero_runtime.experts.record import RecordLayout
from hetero_runtime.experts.table import RecordTable
from hetero_scheduler.keys import ExpertKey


class ExpertFile:
    """All routed experts of a model on disk. Never written to, so any number of engines and threads may read.

        with ExpertFile.open(path) as file:
            file.check_model(checkpoint, table)
            file.read(key, into)

    `table`: the records. `header`: what was packed, from what, and how.
    """

    def __init__(self, header: ExpertFileHeader, file: DirectFile) -> None:
        self.path, self.header = file.path, header
        self.table = table_of(header)
        self._file, self._stored = file, StoredRecords(file, header.map())
        self._positions = np.empty(header.num_records, dtype=np.int64)
        self._positions[self._stored.order] = np.arange(header.num_records)

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open `path`; its header, size, version and tables are checked, no record is read.

        Raises CheckpointError when it is missing, unfinished, truncated, changed or of another version.
        """
        path = Path(path)
        header = read_expert_header(path)
        try:
            file = DirectFile(path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened ({error.strerror})") from error
        try:
            check_order(path, header, StoredRecords(file, header.map()))
            return cls(header, file)
        except BaseException:
            file.close()
            raise

    @property
    def is_direct(self) -> bool:
        """Whether records come around the page cache; False where the file system refuses that."""
        return self._file.is_direct

    def position(self, key: ExpertKey) -> int:
        """Where `key`'s record lies: records of neighbouring positions lie one behind the other."""
        return int(self._positions[self.table.row(key)])

    def keys_in_order(self) -> Iterator[ExpertKey]:
        """All keys in the order of the file: the order in which to read many."""
        return (self.table.key(int(row)) for row in self._stored.order)

    def read(self, key: ExpertKey, into: Bytes, *, is_checked: bool = True) -> None:
        """Read one expert, with one request, into `into`: uint8 `[record_bytes]` that begins at a page.

        `is_checked`: compare the checksum, at some GB/s. Raises CheckpointError, naming the record and its
        place, when the disk fails, the file was truncated or bytes changed; `into` then holds anything.
        """
        self._stored.read(self.position(key), into, is_checked=is_checked)

    def check(self, key: ExpertKey, record: Bytes) -> None:
        """Raise CheckpointError when `record`, read without a check, is not what was written for `key`."""
        self._stored.check(self.position(key), record)

    def errors(self) -> list[float] | None:
        """Of each layer, the root mean square error that its weights were written with over that of the
        weights; None where they were written as they came."""
        if self.header.experts == "checkpoint":
            return None
        by_row = np.empty_like(self._stored.squares)
        by_row[self._stored.order] = self._stored.squares
        return errors_by_layer(by_row, self.table.num_layers)

    def check_model(self, checkpoint: Checkpoint, table: RecordTable) -> None:
        """Raise CheckpointError unless the file was packed from `checkpoint` as it is now, with records as in
        `table`."""
        if table != self.table:
            raise CheckpointError(
                f"{self.path}: holds {_describe(self.table)}; {checkpoint.path} has {_describe(table)}. It "
                f"was packed from another model, or by another version: {PACK_AGAIN}"
            )
        check_sources(self.path, self.header.sources, checkpoint)

    def verify(self, *, threads: int = 4, progress: Callable[[int, int], None] | None = None) -> None:
        """Read every record. Raises CheckpointError that names the damaged ones.

        `progress` is called with (bytes done, bytes in all).
        """
        num_done = 0

        def note(position: int) -> None:
            nonlocal num_done
            num_done += 1
            if progress is not None:
                progress(num_done * self.table.layout.record_bytes, self.table.num_bytes)

        damaged = self._stored.find_damaged(range(self.table.num_records), threads=threads, done=note)
        if damaged:
            keys = [self.table.key(int(self._stored.order[position])) for position in damaged]
            named = ", ".join(f"expert {key.expert} of layer {key.layer}" for key in keys[:3])
            raise CheckpointError(
                f"{self.path}: {len(damaged)} of {self.table.num_records} records are damaged: {named}"
                f"{', ...' if len(keys) > 3 else ''}; check the disk, then {PACK_AGAIN}"
            )

    def close(self) -> None:
        """Close the file; safe to call twice. No read may be under way."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def table_of(header: ExpertFileHeader) -> RecordTable:
    """The records that a header describes. Raises CheckpointError for a dtype or form of another version."""
    try:
        layout = RecordLayout.of([(f.name, TORCH_DTYPES[f.dtype], f.shape) for f in header.fields])
        forms = {name: WeightForm.from_json(form) for name, form in header.forms.items()}
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"an expert file of {header.model} has records of an unknown form ({error}); {PACK_AGAIN}"
        ) from error
    assert layout.record_bytes == header.record_bytes, "a header is written from a layout"
    return RecordTable(header.num_layers, header.num_experts, layout, forms)


def check_order(path: Path, header: ExpertFileHeader, stored: StoredRecords) -> None:
    """Raise CheckpointError when the order was changed or a record was never written."""
    if zlib.crc32(stored.order.data) != header.order_crc32:
        raise CheckpointError(f"{path}: the order of its records was changed; {PACK_AGAIN}")
    num_missing = int((stored.checksums == 0).sum())
    if num_missing:
        raise CheckpointError(
            f"{path}: is unfinished: {num_missing} of {header.num_records} records were never written; "
            f"{PACK_AGAIN}"
        )


def _describe(table: RecordTable) -> str:
    """`3 layers × 16 experts of gate_up_proj BF16[64, 64], down_proj BF16[64, 32]`"""
    fields = ", ".join(f"{f.name} {DTYPE_NAMES[f.dtype]}{list(f.shape)}" for f in table.layout.fields)
    return f"{table.num_layers} layers × {table.num_experts} experts of {fields}"
