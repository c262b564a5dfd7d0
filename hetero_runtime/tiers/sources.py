"""Records in a file or in memory that may be swapped out, read around the page cache or through it.

    direct   one read around the page cache, from disk to slab
    mmap     the file is mapped: the kernel is told which pages come next, then they are copied
    swap     the same with memory that was filled once and may have been swapped out since

A mapping has no way to report a disk that fails: the kernel ends the process. Only `direct` survives that.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import Protocol

import numpy as np

from hetero_runtime.errors import CheckpointError
from hetero_runtime.expert_file import ExpertFile
from hetero_runtime.experts.bank import HostBank
from hetero_runtime.experts.table import RecordTable
from hetero_runtime.tiers.base import Bytes, RecordSource
from hetero_scheduler import ExpertKey


class DirectRecords:
    """Records of an expert file, around the page cache. Closes the file with itself."""

    def __init__(self, file: ExpertFile) -> None:
        self._file = file

    def read(self, key: ExpertKey, into: Bytes) -> None:
        """See RecordSource."""
        self._file.read(key, into, is_checked=False)

    def close(self) -> None:
        """See RecordSource."""
        self._file.close()


class Pages(Protocol):
    """Memory that need not be there: what is read of it comes from a disk first."""

    def array(self) -> Bytes:
        """All of it, uint8, without a copy."""

    def will_need(self, begin: int, num_bytes: int) -> None:
        """Tell the kernel that these bytes, whole pages, are read next: it brings them all at once."""

    def close(self) -> None:
        """Give it back."""


class BankPages:
    """A host bank in small pages, which the system may swap out. Its owner closes it."""

    def __init__(self, bank: HostBank) -> None:
        self._bank = bank

    def array(self) -> Bytes:
        """See Pages."""
        whole: Bytes = self._bank.bytes.numpy()
        return whole

    def will_need(self, begin: int, num_bytes: int) -> None:
        """See Pages."""
        self._bank.will_need(begin, num_bytes)

    def close(self) -> None:
        """See Pages."""


class FilePages:
    """An expert file's records, mapped; the kernel reads no more ahead than it is told to."""

    def __init__(self, file: ExpertFile) -> None:
        """Raises CheckpointError when the file cannot be mapped."""
        self._begin, num_bytes = file.header.map().records.offset, file.table.num_bytes
        descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._mapping = mmap.mmap(descriptor, self._begin + num_bytes, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file.path}: cannot be mapped ({error})") from error
        finally:
            os.close(descriptor)
        self._mapping.madvise(mmap.MADV_RANDOM)
        self._array: Bytes | None = np.frombuffer(self._mapping, dtype=np.uint8)[self._begin :]

    def array(self) -> Bytes:
        """See Pages."""
        assert self._array is not None, "the mapping is closed"
        return self._array

    def will_need(self, begin: int, num_bytes: int) -> None:
        """See Pages."""
        self._mapping.madvise(mmap.MADV_WILLNEED, self._begin + begin, num_bytes)

    def close(self) -> None:
        """See Pages."""
        self._array = None
        self._mapping.close()


class PagedRecords:
    """Records in `pages`, of which the kernel keeps what it can. `position`: the record's number there."""

    def __init__(self, pages: Pages, record_bytes: int, position: Callable[[ExpertKey], int]) -> None:
        self._pages, self._record_bytes, self._position = pages, record_bytes, position

    def read(self, key: ExpertKey, into: Bytes) -> None:
        """See RecordSource. It cannot fail."""
        begin = self._position(key) * self._record_bytes
        self._pages.will_need(begin, self._record_bytes)
        np.copyto(into, self._pages.array()[begin : begin + self._record_bytes])

    def close(self) -> None:
        """See RecordSource."""
        self._pages.close()


class CheckedRecords:
    """Holds each record to its checksum when it is read for the first time: a disk changes no bytes later
    that it did not change then, but for faults that every read would have to be checked against."""

    def __init__(
        self, records: RecordSource, check: Callable[[ExpertKey, Bytes], None], table: RecordTable
    ) -> None:
        """`check`: raises CheckpointError when the bytes of a record are not those that were written."""
        self._records, self._check, self._table = records, check, table
        self._is_checked = np.zeros(table.num_records, dtype=np.bool_)

    def read(self, key: ExpertKey, into: Bytes) -> None:
        """See RecordSource."""
        self._records.read(key, into)
        row = self._table.row(key)
        if not self._is_checked[row]:
            self._check(key, into)
            self._is_checked[row] = True

    def close(self) -> None:
        """See RecordSource."""
        self._records.close()
