"""Two configurations on the same questions: is one better, by how much, and how sure is that?

One value of 0 or 1 a question: McNemar's exact test. Several values a question (the instructions of a
prompt), or other numbers: a sign-flip test on the sums of questions, and a standard error that takes the
question as the unit. All differences of one table are one family for Holm's correction. A difference that is
not significant is no proof of equality: the interval says what the data do not exclude.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from hetero_runtime.errors import RequestError
from hetero_runtime.evaluation.base import clustered_mean
from hetero_runtime.evaluation.results import NATS, Answers, Results
from hetero_runtime.evaluation.significance import LEVEL, half_width, holm, mcnemar, sign_flip


@dataclass(frozen=True)
class Comparison:
    """One metric of one task, `label` against `reference`."""

    label: str
    reference: str
    task: str
    metric: str
    num_questions: int
    value: float
    reference_value: float
    difference: float
    """`value - reference_value`, a mean over paired values."""
    standard_error: float
    only_label: int
    """Questions on which `label` scores higher."""
    only_reference: int
    """Questions on which `reference` does."""
    test: str
    """mcnemar or sign_flip"""
    p: float
    p_holm: float
    """Corrected over the table."""

    @property
    def interval(self) -> tuple[float, float]:
        """95 % of the difference."""
        half = half_width(self.standard_error)
        return self.difference - half, self.difference + half

    @property
    def is_score(self) -> bool:
        """Whether the metric is a score and no likelihood in nats."""
        return not self.metric.partition(",")[0].endswith(NATS)

    @property
    def is_significant(self) -> bool:
        """After correction."""
        return self.p_holm < LEVEL

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {**asdict(self), "interval": self.interval, "is_significant": self.is_significant}


class Summary(NamedTuple):
    """The mean difference over tasks, each by its first score, tasks taken for independent."""

    label: str
    num_tasks: int
    difference: float
    half_width: float
    """Of the 95 % interval."""


def compare(
    reference: Results, others: Sequence[Results], *, metrics: Sequence[str] = ()
) -> list[Comparison]:
    """Each of `others` against `reference`, by task and metric; of `metrics` alone where any are named.

    Raises RequestError where the files do not hold the same questions, or nothing of what is asked for.
    """
    family = [
        _compare_one(reference, other, task, metric)
        for other in others
        for task, metric in _shared(reference, other, metrics)
    ]
    corrected = holm([one.p for one in family])
    return [replace(one, p_holm=p) for one, p in zip(family, corrected, strict=True)]


def summarise(family: Sequence[Comparison]) -> list[Summary]:
    """The mean difference of each configuration; of those with scores in one task alone, none."""
    summaries = []
    for label in dict.fromkeys(one.label for one in family):
        scores = [one for one in family if one.label == label and one.is_score]
        first = {one.task: one for one in reversed(scores)}.values()
        if len(first) > 1:
            spread = math.sqrt(sum(one.standard_error**2 for one in first)) / len(first)
            mean = sum(one.difference for one in first) / len(first)
            summaries.append(Summary(label, len(first), mean, half_width(spread)))
    return summaries


def _shared(reference: Results, other: Results, metrics: Sequence[str]) -> list[tuple[str, str]]:
    pairs = _pairs(reference, metrics)
    for missing, holder, lacking in (
        (set(pairs) - set(_pairs(other, metrics)), reference, other),
        (set(_pairs(other, metrics)) - set(pairs), other, reference),
    ):
        if missing:
            names = ", ".join(sorted(f"{task} {metric}" for task, metric in missing))
            raise RequestError(
                f"{names}: in {holder.label!r} and not in {lacking.label!r}; run the same tasks, or name "
                "what both have with --metric"
            )
    if not pairs:
        known = ", ".join(sorted({metric for each in reference.tasks.values() for metric in each}))
        raise RequestError(f"{reference.label!r} has no metric {', '.join(metrics)}; it has {known}")
    return pairs


def _pairs(results: Results, metrics: Sequence[str]) -> list[tuple[str, str]]:
    return [
        (task, metric)
        for task, each in results.tasks.items()
        for metric in each
        if not metrics or metric in metrics
    ]


def _compare_one(reference: Results, other: Results, task: str, metric: str) -> Comparison:
    theirs, ours = reference.tasks[task][metric], other.tasks[task][metric]
    _check_paired(theirs, ours, f"{task} {metric}: {reference.label!r} and {other.label!r}")
    sums = np.array([math.fsum(ours[q]) - math.fsum(theirs[q]) for q in theirs])
    sizes = [len(values) for values in theirs.values()]
    estimate = clustered_mean(sums, sizes)
    only_ours, only_theirs = int(np.count_nonzero(sums > 0)), int(np.count_nonzero(sums < 0))
    is_binary = max(sizes) == 1 and _is_binary(theirs.values()) and _is_binary(ours.values())
    p = mcnemar(only_ours, only_theirs) if is_binary else sign_flip(sums)
    return Comparison(
        label=other.label,
        reference=reference.label,
        task=task,
        metric=metric,
        num_questions=len(sums),
        value=_mean(ours),
        reference_value=_mean(theirs),
        difference=estimate.mean,
        standard_error=estimate.standard_error,
        only_label=only_ours,
        only_reference=only_theirs,
        test="mcnemar" if is_binary else "sign_flip",
        p=p,
        p_holm=p,
    )


def _check_paired(theirs: Answers, ours: Answers, what: str) -> None:
    if set(theirs) != set(ours):
        odd = sorted(set(theirs) ^ set(ours))
        raise RequestError(
            f"{what} answer different questions ({len(odd)} of them, such as {odd[0]!r}); run both "
            "on the same"
        )
    uneven = [question for question in theirs if len(theirs[question]) != len(ours[question])]
    if uneven:
        raise RequestError(f"{what} have not the same number of values for question {uneven[0]!r}")


def _is_binary(answers: Iterable[tuple[float, ...]]) -> bool:
    return all(value in (0.0, 1.0) for values in answers for value in values)


def _mean(answers: Answers) -> float:
    values = [value for each in answers.values() for value in each]
    return math.fsum(values) / len(values)
