"""The contract of what lies below host memory."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from hetero_scheduler import ExpertKey

Bytes = npt.NDArray[np.uint8]


class RecordSource(Protocol):
    """Records that are read one at a time, each in one go. Any number of threads may read."""

    def read(self, key: ExpertKey, into: Bytes) -> None:
        """Bring the whole record of `key` into `into`: host memory, uint8 `[record_bytes]`, page-aligned.

        Raises OSError or CheckpointError when the disk fails, gives too little, or gives other bytes than
        were written. `into` then holds nothing of use.
        """

    def close(self) -> None:
        """Give back files and mappings. No read is under way, and none follows."""


class StoredRecord(NamedTuple):
    """One expert that lies below host memory. `nbytes`: what a disk must give of it; 0 where it asks none."""

    key: ExpertKey
    nbytes: int
