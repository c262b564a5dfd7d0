"""`hetero-runtime calibrate`: what is learnt of a model once, and kept beside it. A module a command."""

from __future__ import annotations

import typer

from hetero_runtime.cli.calibrate.lookahead import calibrate_lookahead_command
from hetero_runtime.cli.calibrate.prefix import calibrate_prefix_command
from hetero_runtime.cli.calibrate.routing import calibrate_routing_command

app = typer.Typer(
    help="Learn what a model's routers, predictor and memory need, once, and keep it beside the model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("routing")(calibrate_routing_command)
app.command("lookahead")(calibrate_lookahead_command)
app.command("prefix")(calibrate_prefix_command)
