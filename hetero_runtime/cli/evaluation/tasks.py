"""`hetero-runtime eval tasks MODEL --tasks DIR`: benchmarks of lm-evaluation-harness, offline too."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetero_runtime.cli.errors import exit_on_error
from hetero_runtime.cli.evaluation.options import LabelOption, OutOption, RowsOption, loaded, plan_of
from hetero_runtime.cli.options import ConfigOption, JsonOption, ModelArgument, SetOption

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

    from hetero_runtime.config import Config
    from hetero_runtime.evaluation import TokensSeen
    from hetero_runtime.evaluation.harness import Harness
    from hetero_runtime.evaluation.results import Results
    from hetero_runtime.evaluation.tasks import Answers
    from hetero_runtime.evaluation.tasks.served import AnswersDone


@exit_on_error
def tasks_command(
    model: ModelArgument = None,
    folder: Annotated[
        Path | None,
        typer.Option("--tasks", help="Folder of task files (YAML). None: lm-eval's own, which download."),
    ] = None,
    names: Annotated[
        list[str] | None, typer.Option("--task", help="Task, group or tag. Repeatable. None: all of --tasks.")
    ] = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Questions of each task.")] = None,
    fewshot: Annotated[int | None, typer.Option(min=0, help="Examples before each question.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Prompts by the model's chat template.")] = False,
    run_code: Annotated[
        bool, typer.Option("--run-generated-code", help="Let tasks execute, unprotected, what MODEL writes.")
    ] = False,
    label: LabelOption = None,
    out: OutOption = None,
    rows: RowsOption = 16,
    as_json: JsonOption = False,
) -> None:
    """Ask MODEL the questions of tasks: likelihoods by full forwards, text by the engine.

    Task files are lm-evaluation-harness's own; with `dataset_path: json` and local files nothing is
    downloaded.
    """
    from dataclasses import asdict

    from rich.console import Console

    from hetero_runtime.cli.options import config_of
    from hetero_runtime.cli.progress import count_progress
    from hetero_runtime.evaluation.tasks import TaskSettings, run_tasks
    from hetero_runtime.whole_file import check_folder

    if out is not None:
        check_folder(out)
    settings = TaskSettings(folder, tuple(names or ()), limit, fewshot, chat, run_code)
    settings.check()
    chosen = config_of(model, config, overrides)
    plan_of(chosen)
    with count_progress("tokens") as seen, count_progress("answers") as answered:
        answers = _answers(chosen, rows, seen=seen, answered=answered)
        results = run_tasks(
            answers, settings, label=label or chosen.routing.policy, configuration=asdict(chosen)
        )
    if out is not None:
        results.write(out)
    Console(stderr=as_json).print(_table(results))
    if as_json:
        typer.echo(json.dumps(_report(results)))


def _answers(config: Config, rows: int, *, seen: TokensSeen, answered: AnswersDone) -> Answers:
    from hetero_runtime.cli.loading import load_engine, plan_to_load
    from hetero_runtime.evaluation.harness import Harness
    from hetero_runtime.evaluation.tasks.served import ServedAnswers
    from hetero_runtime.evaluation.tasks.spans import SpanReader, begin_token
    from hetero_runtime.hf.tokens import load_tokenizer

    planned = plan_to_load(config)
    tokenizer = load_tokenizer(planned.config.model.path)

    @contextmanager
    def harness() -> Iterator[Harness]:
        with loaded(config) as parts:
            yield Harness(parts, rows_at_once=rows)

    return ServedAnswers(
        tokenizer,
        SpanReader(
            tokenizer,
            begin_token=begin_token(tokenizer),
            max_length=planned.config.execution.max_length,
        ),
        open_harness=harness,
        open_engine=lambda: load_engine(planned),
        seen=seen,
        answered=answered,
    )


def _report(results: Results) -> dict[str, object]:
    from hetero_runtime.evaluation.results import means

    return {
        "label": results.label,
        "tasks": {
            task: {
                metric: {"mean": estimate.mean, "standard_error": estimate.standard_error}
                for metric, estimate in each.items()
            }
            for task, each in means(results).items()
        },
    }


def _table(results: Results) -> Table:
    from rich.table import Table

    from hetero_runtime.evaluation.results import means

    table = Table(
        box=None,
        pad_edge=False,
        padding=(0, 0, 0, 1),
        title=results.label,
        title_justify="left",
        header_style="bold",
    )
    for name in ("task", "metric", "questions", "mean", "standard error"):
        table.add_column(name, justify="left" if name in ("task", "metric") else "right", no_wrap=True)
    for task, each in means(results).items():
        for metric, estimate in each.items():
            count = len(results.tasks[task][metric])
            numbers = (f"{estimate.mean:.4f}", f"{estimate.standard_error:.4f}")
            table.add_row(task, metric, f"{count:,}", *numbers)
    return table
