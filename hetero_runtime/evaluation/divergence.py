"""How far a configuration is from the exact model: excess surprise at text of the exact model (PSR §6.1).

    KL(exact ‖ other) a token  =  E [ log p_exact(token) - log p_other(token) ],  tokens from p_exact

A diagnostic that traces frontiers cheaply; it accepts no configuration, benchmarks do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hetero_runtime.evaluation.base import RowScore, clustered_mean
from hetero_runtime.evaluation.samples import Sample


@dataclass(frozen=True)
class Divergence:
    """Means over the tokens that the exact model wrote."""

    nats: float
    """Excess negative log-likelihood a token: an estimate of the divergence. Below 0 only by chance."""
    standard_error: float
    """Of `nats`, with the window as the unit."""
    exact_nats: float
    """What the exact model itself is surprised by: its entropy, estimated."""
    num_tokens: int
    num_windows: int

    @classmethod
    def of(
        cls, samples: Sequence[Sample], exact: Sequence[RowScore], other: Sequence[RowScore]
    ) -> Divergence:
        """From the scores of `samples` by both. Raises RequestError where there are none."""
        sizes = [len(sample.ids) - sample.num_given for sample in samples]
        ours = [_written(sample, score) for sample, score in zip(samples, other, strict=True)]
        theirs = [_written(sample, score) for sample, score in zip(samples, exact, strict=True)]
        estimate = clustered_mean([a - b for a, b in zip(ours, theirs, strict=True)], sizes)
        return cls(
            nats=estimate.mean,
            standard_error=estimate.standard_error,
            exact_nats=clustered_mean(theirs, sizes).mean,
            num_tokens=sum(sizes),
            num_windows=len(samples),
        )

    @property
    def excess_perplexity(self) -> float:
        """By how much, relative to 1, perplexity is higher: `exp(nats) - 1`."""
        return math.expm1(self.nats)

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {**asdict(self), "excess_perplexity": self.excess_perplexity}


def _written(sample: Sample, score: RowScore) -> float:
    """Nats of the tokens that the model wrote."""
    return float(score.nats[sample.num_given - 1 :].sum())
