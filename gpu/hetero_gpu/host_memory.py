"""Host memory that CUDA can copy from without a detour, and what to do where it is refused.

A copy from registered (page-locked, mapped) memory runs at the speed of the link; from pageable memory at a
quarter of it, and it holds up the caller. Registration can be refused or capped: WSL, Jetson, a memlock
limit, a container. Then a few small pinned buffers stand in between (`staging.StagingRing`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

_PORTABLE, _MAPPED = 1, 2
"""cudaHostRegisterPortable: for every context. cudaHostRegisterMapped: kernels can read it."""

_PROBE_BYTES = 1 << 16


class Registrar(Protocol):
    """The two calls of the CUDA runtime; each returns 0 or an error code."""

    def register(self, address: int, num_bytes: int) -> int:
        """cudaHostRegister, portable and mapped."""

    def unregister(self, address: int) -> int:
        """cudaHostUnregister."""

    def explain(self, code: int) -> str:
        """The error's name. Also clears it, so that the next CUDA call does not report it as its own."""


@dataclass
class Registration:
    """What the machine allowed for one tensor.

    registered  copy from it directly; no single copy may cross a multiple of `chunk_bytes`
    staging     registration was refused, small pinned buffers work: copy through a `StagingRing`
    none        no CUDA device, or nothing can be pinned: plain copies
    """

    kind: Literal["registered", "staging", "none"]
    reason: str
    _registrar: Registrar | None = None
    _addresses: list[int] = field(default_factory=list)

    def release(self) -> None:
        """Undo the registration. No copy from the memory may be in flight. Safe to call twice."""
        if self._registrar is not None:
            for address in self._addresses:
                self._registrar.unregister(address)
        self._addresses = []


def register(
    tensor: torch.Tensor,
    *,
    chunk_bytes: int,
    registrar: Registrar | None = None,
    can_pin: Callable[[], bool] | None = None,
) -> Registration:
    """Register `tensor` (host, contiguous) with CUDA; never raises for what the machine refuses.

    `chunk_bytes`: size of one registration, a multiple of whatever one copy moves. `registrar` and `can_pin`
    are CUDA's unless a test brings its own.
    """
    assert tensor.device.type == "cpu", f"{tensor.device} memory is not host memory"
    assert tensor.is_contiguous(), "a registered range has no gaps"
    if registrar is None:
        if not torch.cuda.is_available():
            return Registration("none", "there is no CUDA device")
        registrar = CudaRegistrar()
    start, num_bytes = tensor.data_ptr(), tensor.nbytes
    addresses: list[int] = []
    for address in range(start, start + num_bytes, chunk_bytes):
        code = registrar.register(address, min(chunk_bytes, start + num_bytes - address))
        if code:
            reason = (
                f"CUDA registered {len(addresses) * chunk_bytes / 1e9:.1f} of {num_bytes / 1e9:.1f} GB, "
                f"then refused: {registrar.explain(code)}"
            )
            Registration("none", "", registrar, addresses).release()
            return _without_registration(reason, can_pin or _can_pin)
        addresses.append(address)
    return Registration("registered", f"{num_bytes / 1e9:.1f} GB registered", registrar, addresses)


def _without_registration(reason: str, can_pin: Callable[[], bool]) -> Registration:
    if can_pin():
        return Registration("staging", f"{reason}; copies go through small pinned buffers")
    return Registration("none", f"{reason}; not even small buffers can be pinned, copies are pageable")


def _can_pin() -> bool:
    try:
        torch.empty(_PROBE_BYTES, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        return False
    return True


class CudaRegistrar:
    """The CUDA runtime that torch has loaded."""

    def __init__(self) -> None:
        torch.cuda.init()
        self._runtime = torch.cuda.cudart()

    def register(self, address: int, num_bytes: int) -> int:
        """See Registrar."""
        return _code(self._runtime.cudaHostRegister(address, num_bytes, _PORTABLE | _MAPPED))

    def unregister(self, address: int) -> int:
        """See Registrar."""
        return _code(self._runtime.cudaHostUnregister(address))

    def explain(self, code: int) -> str:
        """See Registrar. A refused call leaves its error for the next kernel launch to report: launch one."""
        try:
            torch.zeros(1, device="cuda")
        except RuntimeError as error:
            return str(error).splitlines()[0]
        return f"cudaHostRegister returned error {code}"


def _code(answer: Any) -> int:
    """The number of a cudaError, whichever kind of enum torch's bindings make of it."""
    return int(getattr(answer, "value", answer))
