"""Fewer visual tokens behind the pinned prefix, so that fewer experts are needed (VisMMOE §3.2).

compressor   one prompt after the other: listened to, chosen, cut, counted
sequences    prompts with images, told to it
stats        what it has done
build        its parts, from a configuration

The choice itself is `hetero_scheduler.compression`; what is transformers' is `hf/visual` and `hf/token_cut`.
"""

from __future__ import annotations

from hetero_runtime.vision.compressor import Compressor
from hetero_runtime.vision.sequences import CompressedSequences
from hetero_runtime.vision.stats import CompressionStats

__all__ = ["CompressedSequences", "CompressionStats", "Compressor"]
