"""`hetero-runtime eval perplexity MODEL --text FILE`: how well the model predicts a text."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

from hetero_runtime.cli.errors import exit_on_error
from hetero_runtime.cli.evaluation.options import (
    LabelOption,
    LengthOption,
    OutOption,
    RowsOption,
    TextOption,
    WindowsOption,
    loaded,
    plan_of,
)
from hetero_runtime.cli.options import ConfigOption, JsonOption, ModelArgument, SetOption

if TYPE_CHECKING:
    from rich.table import Table

    from hetero_runtime.evaluation.perplexity import Perplexity


@exit_on_error
def perplexity_command(
    text: TextOption,
    model: ModelArgument = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    length: LengthOption = 512,
    windows: WindowsOption = None,
    rows: RowsOption = 16,
    label: LabelOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Nats and perplexity a token of a text that MODEL was not trained on.

    Each window is a request of its own: caches that routing sees begin anew, and a token is predicted from
    those before it in its window.
    """
    from dataclasses import asdict

    from rich.console import Console

    from hetero_runtime.cli.options import config_of
    from hetero_runtime.cli.progress import count_progress
    from hetero_runtime.evaluation.perplexity import Perplexity, by_window
    from hetero_runtime.evaluation.results import Results
    from hetero_runtime.evaluation.texts import cut_rows, read_texts, spread, tokenise
    from hetero_runtime.whole_file import check_folder

    if out is not None:
        check_folder(out)
    texts = read_texts(text)
    asked = config_of(model, config, overrides)
    plan_of(asked)
    from hetero_runtime.evaluation.harness import Harness  # torch: not before all that can be wrong

    with loaded(asked) as parts, count_progress("tokens") as seen:
        documents = tokenise(texts, parts.tokenizer)
        chosen = spread(cut_rows(documents, length), windows)
        scores = Harness(parts, rows_at_once=rows).score(chosen, seen=seen)
    result = Perplexity.of(scores)
    if out is not None:
        Results(label or asked.routing.policy, by_window(scores), asdict(asked)).write(out)
    Console(stderr=as_json).print(_table(result))
    if as_json:
        typer.echo(json.dumps(result.to_json()))


def _table(result: Perplexity) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_row("perplexity", f"{result.perplexity:.4f}")
    table.add_row("nats a token", f"{result.nats:.5f} ± {result.standard_error:.5f} (standard error)")
    table.add_row("tokens predicted", f"{result.num_tokens:,}")
    table.add_row("windows", f"{result.num_windows:,}")
    return table
