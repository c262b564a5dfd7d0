"""What a lookahead predictor's file says of itself, read without its weights and without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from hetero_runtime.errors import CheckpointError
from hetero_runtime.prediction.fingerprint import RouterFingerprint
from hetero_runtime.prediction.metadata import read_metadata
from hetero_scheduler.predict.lookahead_features import LookaheadShape

FORMAT = "hetero_runtime.lookahead/1"
LOOKAHEAD_SUFFIX = ".lookahead.safetensors"
CALIBRATE = "make it with `hetero-runtime calibrate lookahead MODEL --text FILE`"


class LookaheadFile(NamedTuple):
    """`semantic_depth`: first layers whose routing informs predictions enough (L_semantic). `notes`: where
    it comes from, and its recall."""

    fingerprint: RouterFingerprint
    shape: LookaheadShape
    semantic_depth: int
    notes: dict[str, Any]
    num_bytes: int
    """Of the weights."""


def read_lookahead_description(path: Path) -> LookaheadFile:
    """Raises CheckpointError for a file that is missing, truncated or no lookahead predictor."""
    metadata = read_metadata(path, FORMAT, remedy=CALIBRATE)
    try:
        described = json.loads(metadata.words["lookahead"])
        return LookaheadFile(
            RouterFingerprint(**described["fingerprint"]),
            LookaheadShape(**described["shape"]),
            int(described["semantic_depth"]),
            dict(described["notes"]),
            metadata.num_bytes,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: metadata `lookahead` is incomplete ({error!r}); {CALIBRATE}"
        ) from error
