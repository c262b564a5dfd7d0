"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from hetero_runtime.errors import DeviceError


def check_folder(path: Path) -> None:
    """Raise DeviceError where the folder of `path` does not exist: better known before work than after."""
    if not path.resolve().parent.is_dir():
        raise DeviceError(f"{path}: its folder does not exist; create it, or name another file")


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `path`, then put it in its place.

    `path` holds all of it or what it held before, with the permissions of any new file (safetensors writes
    files that only their owner may read). Raises DeviceError when it cannot be written.
    """
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        unfinished.unlink(missing_ok=True)
        unfinished.touch()
        permissions = stat.S_IMODE(unfinished.stat().st_mode)
        write(unfinished)
        unfinished.chmod(permissions)
        os.replace(unfinished, path)
    except (OSError, SafetensorError) as error:
        unfinished.unlink(missing_ok=True)
        raise DeviceError(
            f"{path}: cannot be written ({error}); free room there, or name another file"
        ) from error
