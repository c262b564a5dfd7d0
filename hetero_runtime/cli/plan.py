"""`hetero-runtime plan MODEL`: what goes where, before a weight is read."""

from __future__ import annotations

import json

import typer

from hetero_runtime.cli.errors import exit_on_error
from hetero_runtime.cli.options import ConfigOption, JsonOption, ModelArgument, SetOption


@exit_on_error
def plan_command(
    model: ModelArgument = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the memory plan from config.json and safetensors headers alone."""
    from hetero_runtime.cli.options import config_of
    from hetero_runtime.plan import render_plan, to_json
    from hetero_runtime.planned import plan_for

    plan = plan_for(config_of(model, config, overrides)).memory
    if as_json:
        typer.echo(json.dumps(to_json(plan)))
        return
    from rich.console import Console

    Console().print(render_plan(plan))
