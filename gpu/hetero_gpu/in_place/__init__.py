"""Experts that the CPU computes in the middle of a captured step.

    layer     divide ─ call ─ ensure ─ gather ─ experts ─ add_answer
                        │                          ▲
    host                └── listens ─ computes ────┘           a thread of its own, no GIL while it listens

`divide` says which misses are not to be loaded, `call` hands them over through mapped memory (`Mailbox`),
`add_answer` waits for their sum, within bounds. On the host `await_call` and `answer` are the other end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetero_gpu.in_place.call import add_answer, call
from hetero_gpu.in_place.divide import TURNS, Division, divide
from hetero_gpu.in_place.mailbox import Mailbox

if TYPE_CHECKING:
    from hetero_gpu.in_place.listen import answer, await_call

__all__ = ["TURNS", "Division", "Mailbox", "add_answer", "answer", "await_call", "call", "divide"]


def __getattr__(name: str) -> object:
    """numba, which the host's end needs, takes a while to import."""
    if name in ("answer", "await_call"):
        from hetero_gpu.in_place import listen

        return getattr(listen, name)
    raise AttributeError(name)
