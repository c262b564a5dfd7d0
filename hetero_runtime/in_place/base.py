"""The contract of a backend that computes experts on the CPU, where their records lie in the host bank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from hetero_cpu_kernels.experts.standing import StandingCall

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]


class Work(NamedTuple):
    """What is to be computed of one layer. Expert i gets the rows `tokens[bounds[i]:bounds[i + 1]]` of
    `hidden`, with those `weights`."""

    layer: int
    hidden: Floats
    """`[rows, H]`, C-contiguous."""
    experts: Integers
    """`[experts]`, ascending."""
    bounds: Integers
    """`[experts + 1]`"""
    tokens: Integers
    """`[pairs]`"""
    weights: Floats
    """`[pairs]`"""


class Done(NamedTuple):
    """The weighted sum of a work's experts, `[rows, H]`, and the seconds that computing it took."""

    total: Floats
    seconds: float


class StandingExperts(NamedTuple):
    """What compiled code needs to make a backend's calls itself. Expert e of layer l has its record
    `(l * num_experts + e) * record_bytes` behind the call's bank."""

    call: StandingCall
    record_bytes: int
    num_experts: int
    listener_cpus: frozenset[int]
    """Processors of the thread that makes the calls; none: any."""


class InPlaceExperts(ABC):
    """Computes one piece of work at a time, beside the thread that asks.

    Sums are in float32, an expert's rows in the order of the experts. `num_workers`: threads that compute;
    torch has to leave them their cores. `spare_cpus`: processors to which none of them is bound, for other
    threads that spin; empty where the backend names none.
    """

    num_workers: int
    spare_cpus: frozenset[int] = frozenset()

    @abstractmethod
    def submit(self, work: Work) -> None:
        """Start computing; arrays of `work` stay as they are until `wait`. The work before is waited for."""

    @abstractmethod
    def wait(self) -> Done:
        """Return when the submitted work is done. Raises what went wrong in a worker, DeviceError where it
        was the machine; the next work may be submitted all the same."""

    def stand(self, hidden: Floats, total: Floats, *, top_k: int) -> StandingExperts | None:
        """Ready for calls that compiled code makes, each of rows of `hidden` `[R, H]` with up to `top_k`
        experts, whose sum goes to `total` `[R, H]`; `submit` has to wait meanwhile. None: Python has to."""
        return None

    @abstractmethod
    def close(self) -> None:
        """End the workers and let go of the bank. No work is under way."""
