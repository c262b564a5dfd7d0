"""numba, compiling once a machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator: `numba.njit(**options)`, kept on disk where numba finds a folder for it.

    What such a function calls must stand in its own file: numba looks at that file alone to see that what it
    kept is stale.
    """

    def compile_once(function: Callable[..., Any]) -> Any:
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError:  # neither beside the file nor in the user's cache may anything be written
            return numba.njit(**options)(function)

    return compile_once
