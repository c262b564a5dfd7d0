"""Who carries the bytes of a prefetch: function addresses in the shape of the CUDA runtime's."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch


@dataclass(frozen=True)
class CopyEngine:
    """Addresses of functions that behave as cudaMemcpyAsync, cudaEventRecord and cudaEventQuery, with the
    stream and the events to give them. As many pieces of copies are under way at most as there are events."""

    copy: int
    record: int
    query: int
    stream: int
    events: tuple[int, ...]
    keep: tuple[object, ...] = ()
    """What the addresses live in."""

    @classmethod
    def cuda(cls, device: torch.device, *, num_pieces: int = 3) -> Self:
        """The runtime that torch has loaded, on a stream of its own. Raises OSError if there is none."""
        runtime = _cuda_runtime()
        with torch.cuda.device(device):
            stream = torch.cuda.Stream(device)
            events = [torch.cuda.Event() for _ in range(num_pieces)]
            for event in events:
                event.record(stream)  # torch makes the event when it is first recorded
        return cls(
            copy=_address(runtime, "cudaMemcpyAsync"),
            record=_address(runtime, "cudaEventRecord"),
            query=_address(runtime, "cudaEventQuery"),
            stream=stream.cuda_stream,
            events=tuple(event.cuda_event for event in events),
            keep=(runtime, stream, events),
        )


def sleep_address() -> int:
    """usleep of the C library. Raises OSError where there is none."""
    return _address(ctypes.CDLL(None), "usleep")


def _address(library: ctypes.CDLL, name: str) -> int:
    try:
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
    except AttributeError as error:
        raise OSError(f"{library._name or 'the C library'} has no {name}") from error


def _cuda_runtime() -> ctypes.CDLL:
    """libcudart as already mapped into the process: a second copy would have its own idea of streams."""
    mapped = {
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        if "libcudart" in line
    }
    if not mapped:
        raise OSError("torch has not loaded libcudart, so there is no CUDA runtime to copy with")
    return ctypes.CDLL(sorted(mapped)[0])
