"""Perplexity of a text: how surprised the model is by each token, given those before it in its window."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hetero_runtime.evaluation.base import RowScore, clustered_mean
from hetero_runtime.evaluation.results import NATS, Answers


@dataclass(frozen=True)
class Perplexity:
    """Means over all predicted tokens."""

    nats: float
    """Negative log-likelihood a token."""
    standard_error: float
    """Of `nats`, with the window as the unit."""
    num_tokens: int
    """Tokens predicted; the first of a document is not."""
    num_windows: int

    @classmethod
    def of(cls, scores: Sequence[RowScore]) -> Perplexity:
        """From the scores of all windows. Raises RequestError where there are none."""
        sums, sizes = [float(score.nats.sum()) for score in scores], [len(score.nats) for score in scores]
        estimate = clustered_mean(sums, sizes)
        return cls(estimate.mean, estimate.standard_error, sum(sizes), len(scores))

    @property
    def perplexity(self) -> float:
        """`exp(nats)`: among how many equally likely tokens the model would be as unsure."""
        return math.exp(self.nats)

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {**asdict(self), "perplexity": self.perplexity}


def by_window(scores: Sequence[RowScore]) -> dict[str, dict[str, Answers]]:
    """Nats of every token, as results of questions: a window is one, so that two configurations are compared
    on the same windows."""
    return {"text": {"token" + NATS: {str(i): tuple(each.nats.tolist()) for i, each in enumerate(scores)}}}
