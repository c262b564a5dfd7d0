"""An allocator's refusal, as the error that a user can act on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hetero_runtime.errors import DeviceError


@contextmanager
def no_room_for(what: str, device: torch.device, *, fix: str) -> Iterator[None]:
    """Inside, out of memory becomes a DeviceError: `what` was tried, how much is left, and `fix`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise DeviceError(
            f"{device} has no room for {what}: {free / 1e9:.1f} of {total / 1e9:.1f} GB are free; {fix}"
        ) from error
    except (MemoryError, RuntimeError) as error:
        if not _is_host_refusal(error):
            raise
        raise DeviceError(f"the host has no room for {what} ({_first_line(error)}); {fix}") from error


def _is_host_refusal(error: Exception) -> bool:
    """torch says it with a plain RuntimeError that names its allocator."""
    return isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
