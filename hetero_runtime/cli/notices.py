"""What is logged while a text is streamed: said when the text is over, not in the middle of a word."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import MemoryHandler

_NEVER = logging.CRITICAL + 1
_MOST = 1 << 16
"""Records that are held; more come out early."""


@contextmanager
def notices_afterwards() -> Iterator[None]:
    """Hold what any logger says inside; its end, by an error or not, writes it to standard error."""
    root, held = logging.getLogger(), MemoryHandler(_MOST, _NEVER, target=logging.lastResort)
    held.setLevel(logging.WARNING)
    root.addHandler(held)
    try:
        yield
    finally:
        root.removeHandler(held)
        held.close()
