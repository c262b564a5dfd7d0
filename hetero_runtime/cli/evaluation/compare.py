"""`hetero-runtime eval compare REFERENCE OTHER...`: paired differences, with how sure they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetero_runtime.cli.errors import exit_on_error
from hetero_runtime.cli.options import JsonOption

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from hetero_runtime.evaluation.comparison import Comparison, Summary
    from hetero_runtime.evaluation.results import Results

_COLUMNS = ("task", "metric", "n", "reference", "value", "difference", "+/-", "p", "p (Holm)")


@exit_on_error
def compare_command(
    reference: Annotated[Path, typer.Argument(help="Results that the others are compared with.")],
    others: Annotated[list[Path], typer.Argument(help="Results of other configurations.")],
    metrics: Annotated[
        list[str] | None, typer.Option("--metric", help="Compare this one alone. Repeatable.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare files of `eval tasks --out` question by question: exact McNemar, Holm over the table.

    Where a question has several values (instructions of a prompt) it is still the unit: a sign-flip test, and
    a standard error robust to what is inside it.
    """
    from rich.console import Console

    from hetero_runtime.evaluation.comparison import compare, summarise

    first, *rest = _told_apart([reference, *others])
    family = compare(first, rest, metrics=metrics or ())
    summaries = summarise(family)
    Console(stderr=as_json).print(_render(family, summaries))
    if as_json:
        report = {
            "comparisons": [one.to_json() for one in family],
            "means": [summary._asdict() for summary in summaries],
        }
        typer.echo(json.dumps(report))


def _told_apart(paths: Sequence[Path]) -> list[Results]:
    """Results of `paths`; labels that several have get the name of their file besides."""
    from dataclasses import replace

    from hetero_runtime.evaluation.results import read_results

    found = [read_results(path) for path in paths]
    labels = [each.label for each in found]
    return [
        replace(each, label=f"{each.label} ({path.name})") if labels.count(each.label) > 1 else each
        for each, path in zip(found, paths, strict=True)
    ]


def _render(family: Sequence[Comparison], summaries: Sequence[Summary]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    legend = (
        "n: questions · scores in points of 100, likelihoods in nats · difference with its 95 % interval · "
        "+/-: questions on which the value is higher, lower · * significant at 0.05 after Holm's correction "
        "over all tests shown, † before it alone · what is not significant is no proof of equality"
    )
    labels = dict.fromkeys(one.label for one in family)
    tables = [_table([one for one in family if one.label == label]) for label in labels]
    means = [
        Text(
            f"{each.label}: mean difference over {each.num_tasks} tasks "
            f"{100 * each.difference:+.2f} ± {100 * each.half_width:.2f} points (95 %)"
        )
        for each in summaries
    ]
    return Group(*tables, *means, Text(legend, style="dim"))


def _table(family: Sequence[Comparison]) -> RenderableType:
    from rich.table import Table

    title = f"{family[0].label} against {family[0].reference}"
    table = Table(
        box=None, pad_edge=False, padding=(0, 0, 0, 1), title=title, title_justify="left", header_style="bold"
    )
    for i, name in enumerate(_COLUMNS):
        table.add_column(name, justify="left" if i < 2 else "right", no_wrap=i >= 2)
    for one in family:
        half = (one.interval[1] - one.interval[0]) / 2
        scale, digits = (100, 2) if one.is_score else (1, 4)
        table.add_row(
            one.task,
            one.metric,
            f"{one.num_questions:,}",
            *(f"{scale * value:.{digits}f}" for value in (one.reference_value, one.value)),
            f"{scale * one.difference:+.{digits}f}{_mark(one)} ± {scale * half:.{digits}f}",
            f"{one.only_label:,}/{one.only_reference:,}",
            f"{one.p:.4f}",
            f"{one.p_holm:.4f}",
        )
    return table


def _mark(one: Comparison) -> str:
    from hetero_runtime.evaluation.significance import LEVEL

    if one.is_significant:
        return "*"
    return "†" if one.p < LEVEL else ""
