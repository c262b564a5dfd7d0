"""kt-kernel's extension, imported when asked for, its messages kept out of standard output."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

INSTALL = "pip install --no-deps kt-kernel==0.7.2 gguf"


def is_installed() -> bool:
    """Whether there is a package of that name; nothing is loaded."""
    return importlib.util.find_spec("kt_kernel") is not None


@functools.cache
def load() -> Any:
    """The extension module for this processor. Raises ImportError that says what to do."""
    if not is_installed():
        raise ImportError(f"kt-kernel is not installed; {INSTALL}")
    try:
        import kt_kernel
    except Exception as error:
        raise ImportError(f"kt-kernel is installed and cannot be imported: {error}") from error
    return kt_kernel.kt_kernel_ext


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, what C code prints goes to standard error: kt-kernel greets on standard output, which may be
    the JSON of a command. Of the whole process, so only around construction."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)  # what C holds back is for standard error too
        os.dup2(kept, 1)
        os.close(kept)
