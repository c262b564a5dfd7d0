"""Reading extents into the bank: around the page cache, or through it, whichever is faster here.

A direct read (O_DIRECT) wants aligned offsets, sizes and memory, and safetensors offsets are not aligned: so
a whole extent goes to page-aligned scratch and its reads are copied out, which costs one pass over memory
and leaves the page cache alone. A buffered read goes straight into the records, by way of the page cache.
"""

from __future__ import annotations

import enum
import errno
import mmap
import os
import threading
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from hetero_runtime.errors import CheckpointError
from hetero_runtime.experts.reads import Extent, Read

DIRECT_ALIGN = 4096
"""Satisfies every block size that Linux file systems ask of direct reads."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


PROBES_A_THREAD = 4
"""Extents that each thread reads each way before the faster way is chosen."""


class ReadPath(enum.Enum):
    """How bytes come from a file."""

    DIRECT = "direct"
    BUFFERED = "buffered"


class ExtentReader:
    """Reads extents into `bank` (uint8 `[bank bytes]`). Safe to call from several threads."""

    def __init__(self, bank: torch.Tensor, *, scratch_bytes: int) -> None:
        """`scratch_bytes`: the longest extent; each thread that reads keeps that much."""
        self._bank, self._bank_bytes = bank, bank.numpy()
        self._scratch_bytes = -(-scratch_bytes // DIRECT_ALIGN) * DIRECT_ALIGN + DIRECT_ALIGN
        self._local = threading.local()
        self._lock = threading.Lock()
        self._descriptors: dict[tuple[Path, ReadPath], int] = {}

    def read(self, extent: Extent, path: ReadPath) -> None:
        """Put every read of `extent` where it belongs.

        Raises CheckpointError when bytes are missing or the disk fails, and DirectRefused (before anything
        is written) when this file cannot be read directly.
        """
        try:
            descriptor = self._descriptor(extent.file, path)
            if path is ReadPath.DIRECT:
                self._read_direct(descriptor, extent)
            else:
                self._read_buffered(descriptor, extent)
        except OSError as error:
            if path is ReadPath.DIRECT and error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                raise DirectRefused(str(extent.file)) from error
            raise CheckpointError(
                f"{extent.file}: reading {extent.end - extent.begin} bytes at offset {extent.begin} failed: "
                f"{error.strerror}; check the disk, then download the file again"
            ) from error

    def close(self) -> None:
        """Close the files. Every thread that reads must have returned."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def _read_direct(self, descriptor: int, extent: Extent) -> None:
        begin = extent.begin // DIRECT_ALIGN * DIRECT_ALIGN
        length = -(-(extent.end - begin) // DIRECT_ALIGN) * DIRECT_ALIGN
        scratch = self._scratch()
        _fill(descriptor, scratch[:length], begin, wanted=extent.end - begin, file=extent.file)
        for read in extent.reads:
            source = scratch[read.offset - begin : read.offset - begin + read.num_bytes]
            if read.scatter is None:
                np.copyto(self._bank_bytes[read.target : read.target + read.num_bytes], source)
            else:
                scatter(torch.from_numpy(source), self._bank, read)

    def _read_buffered(self, descriptor: int, extent: Extent) -> None:
        for read in extent.reads:
            if read.scatter is None:
                target = self._bank_bytes[read.target : read.target + read.num_bytes]
                _fill(descriptor, target, read.offset, wanted=read.num_bytes, file=read.file)
            else:
                source = self._scratch()[: read.num_bytes]
                _fill(descriptor, source, read.offset, wanted=read.num_bytes, file=read.file)
                scatter(torch.from_numpy(source), self._bank, read)
        os.posix_fadvise(descriptor, extent.begin, extent.end - extent.begin, os.POSIX_FADV_DONTNEED)

    def _scratch(self) -> npt.NDArray[np.uint8]:
        """This thread's page-aligned scratch; it goes with the thread."""
        if not hasattr(self._local, "scratch"):
            mapping = mmap.mmap(-1, self._scratch_bytes)
            self._local.scratch = np.frombuffer(mapping, dtype=np.uint8)
        scratch: npt.NDArray[np.uint8] = self._local.scratch
        return scratch

    def _descriptor(self, file: Path, path: ReadPath) -> int:
        with self._lock:
            if (file, path) not in self._descriptors:
                flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if path is ReadPath.DIRECT else 0)
                descriptor = os.open(file, flags)
                self._descriptors[file, path] = descriptor
                if path is ReadPath.BUFFERED:
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            return self._descriptors[file, path]


class DirectRefused(Exception):
    """The file system does not do direct reads of this file."""


class PathChoice:
    """Which way to read next: the first `num_probes` extents directly, as many buffered, then the faster.

    With `fixed` there is nothing to choose. Several threads ask and report.
    """

    def __init__(self, *, num_probes: int, fixed: ReadPath | None = None) -> None:
        self._lock = threading.Lock()
        self._num_probes, self._chosen = num_probes, fixed
        self._num_started = 0
        self._num_done = dict.fromkeys(ReadPath, 0)
        self._num_bytes = dict.fromkeys(ReadPath, 0)
        self._seconds = dict.fromkeys(ReadPath, 0.0)

    @classmethod
    def among(cls, num_extents: int, *, threads: int, fixed: ReadPath | None = None) -> PathChoice:
        """A choice for so many extents; too few to learn from are read directly, unless `fixed` says how."""
        num_probes = PROBES_A_THREAD * threads
        if fixed is None and num_extents <= 4 * num_probes:
            fixed = ReadPath.DIRECT
        return cls(num_probes=num_probes, fixed=fixed)

    def next(self) -> ReadPath:
        """The way for the next extent."""
        with self._lock:
            self._num_started += 1
            if self._chosen is not None:
                return self._chosen
            is_second_half = self._num_probes < self._num_started <= 2 * self._num_probes
            return ReadPath.BUFFERED if is_second_half else ReadPath.DIRECT

    def refuse_direct(self) -> None:
        """From now on, everything is buffered."""
        with self._lock:
            self._chosen = ReadPath.BUFFERED

    def observe(self, path: ReadPath, num_bytes: int, began: float) -> None:
        """An extent of `num_bytes` was read; `began` is its `time.perf_counter()`."""
        with self._lock:
            self._num_done[path] += 1
            self._num_bytes[path] += num_bytes
            self._seconds[path] += time.perf_counter() - began
            if self._chosen is None and min(self._num_done.values()) >= self._num_probes:
                self._chosen = max(ReadPath, key=lambda p: self._num_bytes[p] / self._seconds[p])


def read_extent(reader: ExtentReader, extent: Extent, choice: PathChoice) -> int:
    """Read one extent the way that `choice` says. Returns its bytes; raises CheckpointError."""
    path, began = choice.next(), time.perf_counter()
    try:
        reader.read(extent, path)
    except DirectRefused:
        choice.refuse_direct()
        path, began = ReadPath.BUFFERED, time.perf_counter()
        reader.read(extent, path)
    choice.observe(path, extent.num_bytes, began)
    return extent.num_bytes


def scatter(source: torch.Tensor, bank: torch.Tensor, read: Read) -> None:
    """Write the bytes of a strided read (uint8 `[read.num_bytes]`) to where its elements belong."""
    assert read.scatter is not None, "a contiguous read needs no scatter"
    shape, strides, itemsize = read.scatter
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    integer = _INTEGERS[itemsize]
    field = bank[read.target : read.target + span * itemsize].view(integer).as_strided(shape, strides)
    if source.data_ptr() % itemsize:
        source = source.clone()
    field.copy_(source.view(integer).view(shape))


def _fill(
    descriptor: int,
    target: npt.NDArray[np.uint8],
    offset: int,
    *,
    wanted: int,
    file: Path,
) -> None:
    """Read into `target` until `wanted` bytes are there (a direct read asks for more than the file has)."""
    view, done = target.data, 0
    while done < wanted:
        num_read = os.preadv(descriptor, [view[done:]], offset + done)
        if num_read == 0:
            raise CheckpointError(
                f"{file}: ends at byte {offset + done}, {wanted - done} bytes early; it was truncated since "
                f"its header was read: download it again"
            )
        done += num_read
