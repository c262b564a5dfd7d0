"""The lookahead predictor of a model: learnt once from text or images that it reads, kept beside it.

    lessons ─► gather: passes of the engine ─► train ─► FOLDER.lookahead.safetensors ─► foresight/rolling.py

The face is light: a memory plan asks for a file's size and what it says of itself, without torch.
"""

from __future__ import annotations

from hetero_runtime.lookahead.description import LOOKAHEAD_SUFFIX, LookaheadFile, read_lookahead_description

__all__ = ["LOOKAHEAD_SUFFIX", "LookaheadFile", "read_lookahead_description"]
