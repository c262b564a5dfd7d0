"""`hetero-runtime config FILE`: the configuration as this machine and model resolve it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hetero_runtime.cli.errors import exit_on_error
from hetero_runtime.cli.options import JsonOption, SetOption


@exit_on_error
def config_command(
    file: Annotated[Path | None, typer.Argument(help="YAML file. None: defaults.")] = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the resolved configuration: every `auto` decided, nothing loaded; above it, as a comment, why a
    GPU decodes eagerly where `execution.mode: auto` could not do better."""
    import yaml

    from hetero_runtime.config import load_config, render
    from hetero_runtime.planned import decide

    decided = decide(load_config(file, overrides=overrides or ()))
    text = render(decided.config)
    if as_json:
        typer.echo(json.dumps(yaml.safe_load(text)))
        return
    if decided.why_eager is not None:
        typer.echo(f"# execution.mode: auto is eager here: {decided.why_eager}")
    typer.echo(text, nl=False)
