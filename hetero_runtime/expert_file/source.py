"""Whether a checkpoint is still the one that an expert file was packed from.

Each file of the checkpoint has a digest of its size and of samples: one page at each of up to 1024 places,
spread evenly from its first byte to its last. Files of up to 4 MiB are sampled whole. Training, merging or
converting a model changes all of it, so samples see it, in tenths of a second for any size, and a copied
folder is still the same. What they cannot see is a large file of which a few numbers were edited in place.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hetero_runtime.checkpoint import Checkpoint
from hetero_runtime.errors import CheckpointError
from hetero_runtime.expert_file.header import PACK_AGAIN, SourceFile

SAMPLE_BYTES = 4096
MOST_SAMPLES = 1024
_DIGEST_BYTES = 16
_READERS = 8


def read_sources(checkpoint: Checkpoint) -> tuple[SourceFile, ...]:
    """The weight files of `checkpoint`, in the order of their names. Raises CheckpointError."""
    files = sorted({entry.file for entry in checkpoint.entries.values()})
    with ThreadPoolExecutor(_READERS, thread_name_prefix="source-digest") as pool:
        return tuple(pool.map(_read_source, files))


def check_sources(path: Path, recorded: tuple[SourceFile, ...], checkpoint: Checkpoint) -> None:
    """Raise CheckpointError when the expert file `path` was not packed from `checkpoint` as it is now."""
    found = read_sources(checkpoint)
    if [_shape(source) for source in found] != [_shape(source) for source in recorded]:
        raise CheckpointError(
            f"{path}: was packed from another model than {checkpoint.path}: from {_names(recorded)}, and "
            f"there are {_names(found)}; name the file of this model, or {PACK_AGAIN}"
        )
    changed = [new.name for new, old in zip(found, recorded, strict=True) if new.digest != old.digest]
    if changed:
        raise CheckpointError(
            f"{path}: is stale: {', '.join(changed[:3])}{', ...' if len(changed) > 3 else ''} of "
            f"{checkpoint.path} changed since it was packed; {PACK_AGAIN}"
        )


def _read_source(file: Path) -> SourceFile:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            num_bytes = os.fstat(descriptor).st_size
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # samples alone, not what follows them
            for offset in _places(num_bytes):
                digest.update(os.pread(descriptor, SAMPLE_BYTES, offset))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CheckpointError(
            f"{file}: cannot be read ({error.strerror}); check the path and its rights"
        ) from error
    return SourceFile(file.name, num_bytes, digest.hexdigest())


def _places(num_bytes: int) -> Iterator[int]:
    """Offsets of the samples: page after page, or as many as are allowed with the last at the very end."""
    if num_bytes <= MOST_SAMPLES * SAMPLE_BYTES:
        yield from range(0, num_bytes, SAMPLE_BYTES)
        return
    last = num_bytes - SAMPLE_BYTES
    yield from (last * i // (MOST_SAMPLES - 1) for i in range(MOST_SAMPLES))


def _shape(source: SourceFile) -> tuple[str, int]:
    return source.name, source.num_bytes


def _names(sources: tuple[SourceFile, ...]) -> str:
    """`2 files of 3,145,728 bytes, first model-00001.safetensors`"""
    total = sum(source.num_bytes for source in sources)
    return f"{len(sources)} files of {total:,} bytes, first {sources[0].name}"
