"""Run tasks through lm-eval and keep what every question scored."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero_runtime.errors import ConfigError
from hetero_runtime.evaluation.results import NATS, Results
from hetero_runtime.evaluation.tasks.base import Answers

log = logging.getLogger(__name__)

_FIX = "pip install 'hetero-runtime[eval]'"


@dataclass(frozen=True)
class TaskSettings:
    """Which tasks, and how they are asked."""

    folder: Path | None
    """Task files of one's own (YAML); relative paths in them start here. None: those of lm-eval alone, which
    download their questions."""
    names: tuple[str, ...] = ()
    """Tasks, groups and tags; none: all that `folder` defines."""
    limit: int | None = None
    """Questions of each task; None: all."""
    num_fewshot: int | None = None
    """Examples before each question; None: as the task says."""
    is_chat: bool = False
    """Whether the model's chat template makes the prompts."""
    runs_generated_code: bool = False
    """Whether tasks may execute what the model writes, here and unprotected."""

    def check(self) -> None:
        """Raise ConfigError where neither a folder nor a name is given, or the folder is none."""
        if self.folder is None and not self.names:
            raise ConfigError("no task is named; give a folder of task files (--tasks), or names (--task)")
        if self.folder is not None and not self.folder.is_dir():
            raise ConfigError(f"{self.folder}: is no folder; name the one that holds task files (YAML)")


def run_tasks(
    answers: Answers, settings: TaskSettings, *, label: str, configuration: Mapping[str, Any]
) -> Results:
    """What `answers` scores, question by question; the questions of a group are one task.

    Raises ConfigError where lm-eval is not installed or a task is unknown or unreadable, and what `answers`
    raises.
    """
    settings.check()
    try:
        import lm_eval
    except ImportError as error:
        raise ConfigError(f"tasks need lm-eval, which is not here ({error}): {_FIX}") from error
    from hetero_runtime.evaluation.tasks.lm import ServedLM

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = _tasks_of(settings)
    names = list(settings.names) or list(manager.all_subtasks)
    _check_known(names, manager.all_tasks, settings.folder)
    report = lm_eval.simple_evaluate(
        model=ServedLM(answers, name=label),
        tasks=names,
        task_manager=manager,
        limit=settings.limit,
        num_fewshot=settings.num_fewshot,
        apply_chat_template=settings.is_chat,
        confirm_run_unsafe_code=settings.runs_generated_code,
        bootstrap_iters=0,
    )
    return Results(label, collect(names, report), configuration)


def _tasks_of(settings: TaskSettings) -> Any:
    """lm-eval's TaskManager for them."""
    from lm_eval.tasks import TaskManager

    from hetero_runtime.evaluation.tasks.folder import FolderTasks

    return TaskManager() if settings.folder is None else FolderTasks(settings.folder)


def collect(names: Iterable[str], report: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """By task of `names` and metric, the values of each question, from what lm-eval reports.

    A list of numbers (the instructions of a prompt) stays one question with several values. A pair
    (log-likelihood, units), of which a perplexity is made, becomes nats a unit, named `METRIC.nats`. What is
    no number, such as the pair of texts of a corpus score, has no value of its own: left out, with a warning.
    """
    tasks: dict[str, dict[str, dict[str, Any]]] = {}
    for name in names:
        leaves, metrics = _leaves(name, report), tasks.setdefault(name, {})
        for leaf in leaves:
            samples = report["samples"][leaf]
            has_filters = len({sample["filter"] for sample in samples}) > 1
            for sample in samples:
                question = str(sample["doc_id"]) if leaves == [name] else f"{leaf}/{sample['doc_id']}"
                for metric in sample["metrics"]:
                    key, values = _values(metric, sample[metric])
                    key += f",{sample['filter']}" if has_filters else ""
                    metrics.setdefault(key, {})[question] = values
        _drop_unvalued(name, metrics)
    return tasks


def _leaves(name: str, report: Mapping[str, Any]) -> list[str]:
    """The tasks that `name` stands for: itself, or those of its group, all the way down."""
    if name in report["samples"]:
        return [name]
    return [leaf for each in report["group_subtasks"][name] for leaf in _leaves(each, report)]


def _values(metric: str, value: Any) -> tuple[str, tuple[float, ...]]:
    """Name and numbers of one question; no numbers where it has none."""
    if isinstance(value, tuple) and len(value) == 2 and all(isinstance(part, int | float) for part in value):
        log_likelihood, units = value
        return metric + NATS, (-log_likelihood / units,)
    parts = value if isinstance(value, list) else [value]
    if not all(isinstance(part, bool | int | float) for part in parts):
        return metric, ()
    return metric, tuple(float(part) for part in parts)


def _drop_unvalued(task: str, metrics: dict[str, dict[str, Any]]) -> None:
    for metric in [metric for metric, answers in metrics.items() if not all(answers.values())]:
        log.warning("%s: %s has no value of single questions; it is left out", task, metric)
        del metrics[metric]


def _check_known(names: list[str], known: Iterable[str], folder: Path | None) -> None:
    missing = sorted(set(names) - set(known))
    where = "lm-eval has" if folder is None else f"{folder} has"
    if missing or not names:
        shown = ", ".join(sorted(known)[:20]) or "no task file (YAML with a `task:` key)"
        raise ConfigError(f"{', '.join(missing) or 'no task'}: {where} {shown}")
