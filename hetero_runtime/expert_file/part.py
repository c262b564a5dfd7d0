"""An expert file in the making: `FILE.part`, which becomes FILE when the last record is in it.

All room is taken before the first record is written, so a full disk is known at once. A record is there when
its checksum is: whatever ends the process, the next one reads what is there, trusts what its checksums
confirm, and goes on with the rest.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hetero_runtime.config.sizes import format_size
from hetero_runtime.errors import DeviceError, RequestError
from hetero_runtime.expert_file.header import ExpertFileHeader
from hetero_runtime.expert_file.stored import Bytes, DirectFile, Squares, StoredRecords, checksum

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class PartFile:
    """The records of `out` as far as they are written. `put` may be called from several threads."""

    def __init__(self, out: Path, header: ExpertFileHeader, order: npt.NDArray[np.int32]) -> None:
        """Begin, or go on where another process stopped; its records are not checked yet.

        `order`: rows in the order of the file, int32 `[num_records]`. Raises RequestError when `out` exists,
        somebody is writing it, or a part of other content is there; DeviceError when there is no room.
        """
        self.out, self._at = out, header.map()
        self.path = out.with_name(out.name + ".part")
        if out.exists():
            raise RequestError(f"{out}: exists already; remove it, or name another file")
        try:
            self._file = DirectFile(self.path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise self._refusal(error) from error
        try:
            self._lock()
            if self._is_new(header.encode()):
                self._begin(header.encode(), order)
            self._stored = StoredRecords(self._file, self._at)
        except BaseException:
            self.close()
            raise

    def missing(self, *, threads: int) -> list[int]:
        """Positions that are still to be written. Reads all that are there, and forgets the damaged ones."""
        there = np.flatnonzero(self._stored.checksums).tolist()
        self._stored.checksums[self._stored.find_damaged(there, threads=threads)] = 0
        return [int(position) for position in np.flatnonzero(self._stored.checksums == 0)]

    def put(self, position: int, record: Bytes, squares: Squares) -> None:
        """Write one record, uint8 `[record_bytes]` from a page on, and its sums, float64 `[2]`.

        Raises DeviceError; where the disk is full the part is removed.
        """
        squares_at = self._at.squares.offset + position * squares.nbytes
        number = np.array([checksum(record, squares)], dtype=np.int64)
        checksum_at = self._at.checksums.offset + position * number.nbytes
        try:
            offset = self._at.records.offset + position * record.nbytes
            _write(self._file.descriptor, record, offset)
            _write(self._file.cached, squares.view(np.uint8), squares_at)
            _write(self._file.cached, number.view(np.uint8), checksum_at)
        except OSError as error:
            raise self._refusal(error) from error
        self._stored.squares[position], self._stored.checksums[position] = squares, number[0]

    def finish(self) -> None:
        """All records are written: make it durable, and make it `out`. Raises DeviceError."""
        assert self._stored.checksums.all(), f"{self.path}: records are missing"
        try:
            os.fsync(self._file.cached)
            os.replace(self.path, self.out)
            folder = os.open(self.out.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
        except OSError as error:
            raise self._refusal(error) from error
        self.close()

    def close(self) -> None:
        """Close it, and let others go on; safe to call twice."""
        self._file.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file.cached, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RequestError(f"{self.path}: another process is writing it; wait for that one") from error

    def _is_new(self, header: bytes) -> bool:
        """Whether nothing was begun. Raises RequestError when something else was."""
        found = os.pread(self._file.cached, len(header), 0)
        if not any(found):
            return True
        if found != header or os.fstat(self._file.cached).st_size != self._at.file_bytes:
            raise RequestError(
                f"{self.path}: was begun from another model or state of it, with other settings or by "
                "another version; go on as it was begun, or remove it to begin anew"
            )
        return False

    def _begin(self, header: bytes, order: npt.NDArray[np.int32]) -> None:
        """Take the room, then write the order; the header last, since it says that all this was done."""
        assert order.shape == self._at.order.shape and order.dtype == np.int32, f"{order.dtype}{order.shape}"
        try:
            if self._at.file_bytes > _free_bytes(self.path):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            _take_room(self._file.cached, self._at.file_bytes)
            _write(self._file.cached, order.view(np.uint8), self._at.order.offset)
            _write(self._file.cached, np.frombuffer(header, dtype=np.uint8), 0)
        except OSError as error:
            raise self._refusal(error) from error

    def _refusal(self, error: OSError) -> DeviceError:
        """The error in words; a part for which there is no room is removed first."""
        if error.errno not in _NO_ROOM:
            return DeviceError(f"{self.path}: cannot be written ({error.strerror}); name another file")
        self.path.unlink(missing_ok=True)
        needed, free = self._at.file_bytes, _free_bytes(self.out)
        return DeviceError(
            f"{self.out}: needs {format_size(needed)} ({needed:,} bytes), and {self.out.parent} has "
            f"{format_size(free)} free ({free:,} bytes; {error.strerror}); free room there, raise the limit "
            "of the process (ulimit -f), or name a file elsewhere. Nothing is left of it"
        )


def _free_bytes(path: Path) -> int:
    """Bytes that this user may still write where `path` lies, with what `path` takes now."""
    status = os.statvfs(path.parent)
    taken = path.stat().st_blocks * 512 if path.exists() else 0
    return status.f_bavail * status.f_frsize + taken


def _take_room(descriptor: int, num_bytes: int) -> None:
    """Let the file have `num_bytes`, of zeros where nothing was; where a file system cannot promise the room,
    it is as long at least. Raises OSError."""
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(descriptor, num_bytes)


def _write(descriptor: int, data: Bytes, offset: int) -> None:
    done = 0
    while done < data.nbytes:
        done += os.pwrite(descriptor, data.data[done:], offset + done)
