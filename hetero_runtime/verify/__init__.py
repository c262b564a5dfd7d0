"""The self-check: offloaded output against transformers' own, token for token and layer by layer."""

from __future__ import annotations

from hetero_runtime.verify.comparison import LayerError, Verification
from hetero_runtime.verify.tolerance import tolerance_of
from hetero_runtime.verify.verify import PROMPTS, verify

__all__ = ["PROMPTS", "LayerError", "Verification", "tolerance_of", "verify"]
