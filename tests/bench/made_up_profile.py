"""torch's profiler as benches see it, with events that a test made up."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any


def event(name: str, begin: float, end: float, *, kind: str = "CUDA", is_range: bool = False) -> Any:
    """Of a device, from `begin` to `end` in microseconds."""
    return SimpleNamespace(
        name=name,
        device_type=SimpleNamespace(name=kind),
        time_range=SimpleNamespace(start=begin, end=end),
        is_user_annotation=is_range,
    )


class MadeUpProfile:
    """Sees the same work every time."""

    def __init__(self, events: Sequence[Any]) -> None:
        self._events = events

    def __call__(self, **_: object) -> MadeUpProfile:
        """In place of `torch.profiler.profile`."""
        return self

    def __enter__(self) -> MadeUpProfile:
        return self

    def __exit__(self, *_: object) -> None: ...

    def events(self) -> Sequence[Any]:
        """All of them."""
        return self._events
