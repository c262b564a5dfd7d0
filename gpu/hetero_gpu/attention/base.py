"""What kind of attention a layer computes."""

from __future__ import annotations

from typing import NamedTuple


class AttentionForm(NamedTuple):
    """`scaling` of query·key; `window`: how many of the last tokens are seen, the query's own included (None:
    all); `soft_cap`: logits become `soft_cap · tanh(logit / soft_cap)`."""

    scaling: float
    window: int | None = None
    soft_cap: float | None = None
