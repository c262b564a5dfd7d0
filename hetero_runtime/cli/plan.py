"""`hetero-runtime plan MODEL`: what goes where, before a weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hetero_runtime.cli.errors import exit_on_error


@exit_on_error
def plan_command(
    model: Annotated[
        str | None,
        typer.Argument(help="Folder of a Hugging Face checkpoint. None: model.path, or the bundled model."),
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help="YAML file.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override, such as memory.slabs=64. Repeatable."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Print the memory plan from config.json and safetensors headers alone."""
    from dataclasses import replace

    from hetero_runtime.config import load_config, model_dir, resolve
    from hetero_runtime.plan import detect, make_plan, read_geometry, render_plan, to_json

    wanted = load_config(config, overrides=overrides or ())
    if model is not None:
        wanted = replace(wanted, model=replace(wanted.model, path=model))
    geometry, hardware = read_geometry(model_dir(wanted)), detect(wanted.device)
    plan = make_plan(geometry, resolve(wanted, hardware, geometry), hardware)
    if as_json:
        typer.echo(json.dumps(to_json(plan)))
        return
    from rich.console import Console

    Console().print(render_plan(plan))
