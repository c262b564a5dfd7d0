"""Float matrices written in the encodings that the expert kernels read, on one core a call, without the GIL.

`quantize` is the face; each encoding has a module. A module compiles when it is first used.
"""

from __future__ import annotations

from hetero_cpu_kernels.quantize.base import QuantizedError, quantize

__all__ = ["QuantizedError", "quantize"]
