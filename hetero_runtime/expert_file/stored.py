"""The records of an expert file, finished or not, with the checksums that lie behind them.

A record is read around the page cache (O_DIRECT), with one request: offsets, sizes and memory are whole
pages. Where the file system refuses that (tmpfs), it is read through the cache. Memory that a driver has
mapped can be out of a disk's reach: then a record comes by way of a buffer of the thread that reads it.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hetero_runtime.errors import CheckpointError
from hetero_runtime.expert_file.header import PACK_AGAIN, WRITTEN, FileMap
from hetero_runtime.experts.bank import HostBank
from hetero_runtime.experts.in_parallel import run_all
from hetero_runtime.experts.record import RECORD_ALIGN

log = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]
Squares = npt.NDArray[np.float64]


class DirectFile:
    """An open file; records are read and written directly, or through the cache where that is refused."""

    def __init__(self, path: Path, flags: int) -> None:
        """`flags`: of `os.open`. Raises OSError."""
        self.path = path
        self.cached = os.open(path, flags | os.O_CLOEXEC, 0o666)
        """Descriptor for all that is no record."""
        self.descriptor = self._open_direct(flags)
        """Descriptor for records."""

    @property
    def is_direct(self) -> bool:
        """Whether records come around the page cache."""
        return self.descriptor != self.cached

    def _open_direct(self, flags: int) -> int:
        """A descriptor that has read a page directly; the cached one where that cannot be."""
        try:
            descriptor = os.open(self.path, flags | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            return self.cached
        try:
            os.preadv(descriptor, [page_aligned(1, RECORD_ALIGN)[0].data], 0)
        except OSError:
            os.close(descriptor)
            return self.cached
        return descriptor

    def read_array(self, dtype: type, count: int, offset: int) -> npt.NDArray[Any]:
        """`count` elements from byte `offset` on, through the cache."""
        array: npt.NDArray[Any] = np.empty(count, dtype)
        num_read = os.preadv(self.cached, [array.view(np.uint8).data], offset)
        assert num_read == array.nbytes, f"{self.path}: {num_read} of {array.nbytes} bytes at {offset}"
        return array

    def close(self) -> None:
        """Close it; safe to call twice."""
        if self.is_direct:
            os.close(self.descriptor)
        if self.cached >= 0:
            os.close(self.cached)
        self.descriptor = self.cached = -1


class _OutOfReach(CheckpointError):
    """The kernel cannot read from a disk to this memory."""


class StoredRecords:
    """Records by their position in the file. Any number of threads may read."""

    def __init__(self, file: DirectFile, at: FileMap) -> None:
        """Reads the tables behind the records."""
        self._file, self._records = file, at.records
        self.num_records, self.record_bytes = at.records.shape
        count = self.num_records
        self.squares: Squares = file.read_array(np.float64, 2 * count, at.squares.offset).reshape(count, 2)
        self.checksums: npt.NDArray[np.int64] = file.read_array(np.int64, count, at.checksums.offset)
        self.order: npt.NDArray[np.int32] = file.read_array(np.int32, count, at.order.offset)
        self._by_way, self._is_in_reach = threading.local(), True

    def read(self, position: int, into: Bytes, *, is_checked: bool = True) -> None:
        """Read one record into `into`: uint8 `[record_bytes]` that begins at a page.

        Raises CheckpointError when the disk fails, the file ends early, or the bytes are not those that were
        written; `into` then holds anything.
        """
        assert into.nbytes == self.record_bytes, f"{into.nbytes} bytes for a record of {self.record_bytes}"
        assert into.ctypes.data % RECORD_ALIGN == 0, "direct reads go to whole pages"
        if self._is_in_reach:
            try:
                self._fill(position, into)
            except _OutOfReach:
                log.warning(
                    "%s: memory of the device is out of the disk's reach: copied there", self._file.path
                )
                self._is_in_reach = False
        if not self._is_in_reach:
            buffer = self._buffer()
            self._fill(position, buffer)
            np.copyto(into, buffer)
        if is_checked:
            self.check(position, into)

    def _fill(self, position: int, into: Bytes) -> None:
        offset, done = self._records.offset + position * self.record_bytes, 0
        while done < self.record_bytes:
            try:
                num_read = os.preadv(self._file.descriptor, [into.data[done:]], offset + done)
            except OSError as error:
                kind = _OutOfReach if error.errno == errno.EFAULT else CheckpointError
                raise kind(
                    f"{self._file.path}: reading record {position} at byte {offset} failed: "
                    f"{error.strerror}; check the disk, or {PACK_AGAIN}"
                ) from error
            if num_read == 0:
                raise CheckpointError(
                    f"{self._file.path}: ends at byte {offset + done}, inside record {position}: it was "
                    f"truncated since it was opened; {PACK_AGAIN}"
                )
            done += num_read

    def _buffer(self) -> Bytes:
        """This thread's own record; it goes with the thread."""
        if not hasattr(self._by_way, "record"):
            self._by_way.record = page_aligned(1, self.record_bytes)[0]
        record: Bytes = self._by_way.record
        return record

    def check(self, position: int, record: Bytes) -> None:
        """Raise CheckpointError when `record` is not what was written at `position`."""
        if self.checksums[position] != checksum(record, self.squares[position]):
            offset = self._records.offset + position * self.record_bytes
            raise CheckpointError(
                f"{self._file.path}: record {position}, at byte {offset}, is damaged: its checksum is wrong; "
                f"check the disk, then {PACK_AGAIN}"
            )

    def find_damaged(
        self, positions: Sequence[int], *, threads: int, done: Callable[[int], None] = lambda position: None
    ) -> list[int]:
        """Those of `positions` whose bytes are not as they were written. Every one is read."""
        rows = page_aligned(threads, self.record_bytes)
        damaged: list[int] = []

        def check(position: int, worker: int) -> None:
            self.read(position, rows[worker], is_checked=False)
            if self.checksums[position] != checksum(rows[worker], self.squares[position]):
                damaged.append(position)

        run_all(check, positions, threads=threads, done=done)
        return sorted(damaged)


def checksum(record: Bytes, squares: Squares) -> int:
    """Of a record and its two sums, as the table has it."""
    return zlib.crc32(squares.tobytes(), zlib.crc32(record.data)) + WRITTEN


def page_aligned(num_rows: int, row_bytes: int) -> Bytes:
    """Zeros, uint8 `[num_rows, row_bytes]`; rows of whole pages begin at pages."""
    rows: Bytes = HostBank(num_rows * row_bytes).bytes.numpy().reshape(num_rows, row_bytes)
    return rows
