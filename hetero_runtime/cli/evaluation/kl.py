"""`hetero-runtime eval kl MODEL --set ...`: how far a configuration is from the exact model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from hetero_runtime.cli.errors import exit_on_error
from hetero_runtime.cli.evaluation.options import (
    LengthOption,
    RowsOption,
    SamplesOption,
    SeedOption,
    check_samples,
    loaded,
    plan_of,
    samples_of,
)
from hetero_runtime.cli.options import ConfigOption, JsonOption, ModelArgument, SetOption

if TYPE_CHECKING:
    from rich.table import Table

    from hetero_runtime.evaluation.divergence import Divergence


@exit_on_error
def kl_command(
    model: ModelArgument = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    samples: SamplesOption = None,
    length: LengthOption = 256,
    windows: Annotated[int, typer.Option("--windows", min=1, help="Windows to draw.")] = 16,
    seed: SeedOption = 0,
    rows: RowsOption = 16,
    as_json: JsonOption = False,
) -> None:
    """Excess nats a token at text that the exact MODEL writes: the divergence of a configuration from it.

    The exact model is the same one with its experts as in the checkpoint and routing as its router says.
    """
    from rich.console import Console

    from hetero_runtime.cli.options import config_of
    from hetero_runtime.cli.progress import count_progress
    from hetero_runtime.evaluation.configuration import exact
    from hetero_runtime.evaluation.divergence import Divergence

    asked = config_of(model, config, overrides)
    for each in (exact(asked), asked):
        plan_of(each)
    check_samples(samples)
    from hetero_runtime.evaluation.harness import Harness  # torch: not before all that can be wrong

    with count_progress("tokens") as seen:
        with loaded(exact(asked)) as parts:
            drawn = samples_of(parts, samples, length=length, windows=windows, seed=seed, seen=seen)
            texts = [sample.ids for sample in drawn]
            reference = Harness(parts, rows_at_once=rows).score(texts, seen=seen)
        with loaded(asked) as parts:
            scores = Harness(parts, rows_at_once=rows).score(texts, seen=seen)
    result = Divergence.of(drawn, reference, scores)
    Console(stderr=as_json).print(_table(result))
    if as_json:
        typer.echo(json.dumps(result.to_json()))


def _table(result: Divergence) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_row("KL, nats a token", f"{result.nats:.5f} ± {result.standard_error:.5f} (standard error)")
    table.add_row("excess perplexity", f"{result.excess_perplexity:.2%}")
    table.add_row("exact model, nats a token", f"{result.exact_nats:.5f}")
    table.add_row("tokens that it wrote", f"{result.num_tokens:,} in {result.num_windows:,} windows")
    return table
