"""Experts that the CPU computes in the middle of a captured step.

    layer     ensure: divides, calls ─ gather ─ experts ─ add_answer
                        │                          ▲
    host                └── listens ─ computes ────┘           a thread of its own, no GIL while it listens

`hetero_gpu.tables` says which misses are not to be loaded, and `call_cpu` hands them over in the same launch,
through mapped memory (`Mailbox`); `Calls.add_answer` waits for their sum, within bounds. On the host
`await_call` and `answer` are the other end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetero_gpu.in_place.call import MOST_LOOKS, Calls, call_cpu
from hetero_gpu.in_place.mailbox import Mailbox

if TYPE_CHECKING:
    from hetero_gpu.in_place.listen import answer, await_call

__all__ = ["MOST_LOOKS", "Calls", "Mailbox", "answer", "await_call", "call_cpu"]


def __getattr__(name: str) -> object:
    """numba, which the host's end needs, takes a while to import."""
    if name in ("answer", "await_call"):
        from hetero_gpu.in_place import listen

        return getattr(listen, name)
    raise AttributeError(name)
