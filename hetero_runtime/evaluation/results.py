"""Results question by question, on disk: what two configurations are compared by.

{"format": ..., "label": "psr 0.3", "configuration": {...},
 "tasks": {"arc": {"acc": {"0": [1.0], "1": [0.0]}},           one value a question
           "ifeval": {"inst_level_strict_acc": {"7": [1, 0]}}}}  one a part of it (an instruction)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetero_runtime.errors import RequestError
from hetero_runtime.evaluation.base import Estimate, clustered_mean
from hetero_runtime.whole_file import write_whole

FORMAT = "hetero-runtime results of questions, 1"
NATS = ".nats"
"""Ends the name of a metric that is a likelihood in nats, the lower the better; others are scores."""
_SHAPE = '"tasks": {task: {metric: {question: [numbers]}}}'

Answers = Mapping[str, tuple[float, ...]]
"""By question: its values. Questions are independent of each other; values of one question are not."""


@dataclass(frozen=True)
class Results:
    """What one configuration scored."""

    label: str
    """What tables call it."""
    tasks: Mapping[str, Mapping[str, Answers]]
    """By task and metric, in the order in which tables show them."""
    configuration: Mapping[str, Any]
    """What was run, for a reader."""

    def write(self, path: Path) -> None:
        """All of it or nothing. Raises DeviceError where `path` cannot be written."""
        content = json.dumps({"format": FORMAT, **asdict(self)}) + "\n"
        write_whole(path, lambda file: file.write_text(content, encoding="utf-8"))


def read_results(path: Path) -> Results:
    """Raises RequestError that says what in `path` is not as `Results.write` leaves it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(
            f"{path}: cannot be read ({error}); `hetero-runtime eval tasks --out` writes such files"
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise RequestError(f"{path}: is no file of results; `hetero-runtime eval tasks --out` writes them")
    try:
        tasks = {
            task: {metric: _answers(values) for metric, values in metrics.items()}
            for task, metrics in content["tasks"].items()
        }
        return Results(str(content["label"]), tasks, dict(content["configuration"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RequestError(f"{path}: is damaged ({error!r}); it should hold {_SHAPE}") from error


def means(results: Results) -> dict[str, dict[str, Estimate]]:
    """The mean of each metric of each task over its values, with the question as the unit."""
    return {
        task: {
            metric: clustered_mean([sum(each) for each in answers.values()], [*map(len, answers.values())])
            for metric, answers in metrics.items()
        }
        for task, metrics in results.tasks.items()
    }


def _answers(values: Mapping[str, list[float]]) -> Answers:
    answers = {question: tuple(float(value) for value in each) for question, each in values.items()}
    if not answers or not all(answers.values()):
        raise ValueError("a metric without values")
    return answers
