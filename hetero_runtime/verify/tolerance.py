"""How far logits may be from transformers' own: by where experts are computed, how steps run, and the dtype.

    load            transformers' operations in transformers' order: the tokens are equal
    cpu, hybrid     experts on the CPU are summed up in float32, the others one by one in the model's dtype:
                    each layer differs in the last bits of that dtype, and layers to come go on from there
    graph           the same: kernels of a captured step sum in another order

A rounding can also turn a router's choice between two experts that it likes alike, and then a step's logits
differ by more than rounding does. So the typical step is held to the tolerance: the median of their largest
differences. What is computed wrongly is wrong in every step.
"""

from __future__ import annotations

from hetero_runtime.config.tree import Dtype, MissHandler, Mode

_ROUNDING: dict[Dtype, float] = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""Of the largest logit."""


def tolerance_of(handler: MissHandler, dtype: Dtype, *, mode: Mode = "eager") -> float:
    """Typical difference of logits, relative to the largest logit; 0 where tokens have to be equal."""
    return 0.0 if handler == "load" and mode == "eager" else _ROUNDING[dtype]
