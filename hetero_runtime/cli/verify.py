"""`hetero-runtime verify`: is offloaded output transformers' own?"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from hetero_runtime.cli import sampling
from hetero_runtime.cli.errors import exit_on_error
from hetero_runtime.cli.options import ConfigOption, JsonOption, ModelArgument, SetOption

if TYPE_CHECKING:
    from rich.table import Table

    from hetero_runtime.planned import Planned
    from hetero_runtime.verify import Verification


COLUMNS = (
    "slabs",
    "residency",
    "mode",
    "tokens",
    "equal",
    "largest logit error",
    "hit rate",
    "first difference",
)


@exit_on_error
def verify_command(
    model: ModelArgument = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
    max_tokens: sampling.MaxTokens = 64,
    prompts: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="Instead of the built-in ones. Repeatable.")
    ] = None,
) -> None:
    """Compare greedy tokens, logits and layers with plain transformers; exit code 1 when they disagree.

    That is when tokens differ; or, with captured steps and with misses.handler cpu or hybrid, which sum in
    another order, when logits differ beyond rounding. The engine decodes as it would serve: write
    --set execution.mode=eager for transformers' own bits on a GPU.

    At the smallest legal residency, 25 % and 100 %, unless memory.slabs or memory.residency says which.
    """
    from rich.console import Console

    from hetero_runtime.cli.loading import plan_to_load
    from hetero_runtime.cli.options import config_of
    from hetero_runtime.planned import three_residencies

    planned = [plan_to_load(one) for one in three_residencies(config_of(model, config, overrides))]
    results = _verify(planned, prompts, max_tokens=max_tokens)
    Console(stderr=as_json).print(_table(results))
    if as_json:
        typer.echo(json.dumps(_report(results)))
    if not all(result.agrees for result in results):
        raise typer.Exit(1)


def _verify(planned: list[Planned], prompts: list[str] | None, *, max_tokens: int) -> list[Verification]:
    from hetero_runtime.hf.console import keep_quiet
    from hetero_runtime.verify import PROMPTS, verify

    keep_quiet()
    return verify(planned, prompts=prompts or PROMPTS, max_tokens=max_tokens)


def _table(results: list[Verification]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for result in results:
        first = result.first_difference
        table.add_row(
            f"{result.slabs:,}",
            f"{result.residency:.1%}",
            result.mode,
            f"{result.num_tokens}",
            _equal(result),
            _error(result),
            f"{result.hit_rate:.1%}",
            "-" if first is None else f"{first.layer} ({first.max_error:.2g})",
        )
    return table


def _equal(result: Verification) -> str:
    if result.tokens_equal:
        return "[green]yes[/]"
    return "no, within rounding" if result.agrees else "[red]no[/]"


def _error(result: Verification) -> str:
    """The largest difference, beside what is allowed where that is not nothing."""
    if result.is_bit_equal:
        return "0 (every bit)"
    text = f"{result.max_logit_error:.2g}"
    if result.tolerance:
        allowed = result.tolerance * result.max_logit
        text += f"; typical {result.typical_logit_error:.2g} of {allowed:.2g} allowed"
    return text if result.agrees else f"[red]{text}[/]"


def _report(results: list[Verification]) -> dict[str, object]:
    return {
        "agrees": all(result.agrees for result in results),
        "tokens_equal": all(result.tokens_equal for result in results),
        "max_logit_error": max(result.max_logit_error for result in results),
        "hit_rate": min(result.hit_rate for result in results),
        "runs": [result.to_json() for result in results],
    }
