"""`hetero-runtime eval`: what a configuration does to the quality of a model. A module for each command."""

from __future__ import annotations

import typer

from hetero_runtime.cli.evaluation.compare import compare_command
from hetero_runtime.cli.evaluation.copies import copies_command
from hetero_runtime.cli.evaluation.frontier import frontier_command
from hetero_runtime.cli.evaluation.kl import kl_command
from hetero_runtime.cli.evaluation.perplexity import perplexity_command
from hetero_runtime.cli.evaluation.tasks import tasks_command

app = typer.Typer(
    help="What a configuration does to quality: perplexity, divergence, tasks, comparisons.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("perplexity")(perplexity_command)
app.command("kl")(kl_command)
app.command("frontier")(frontier_command)
app.command("copies")(copies_command)
app.command("tasks")(tasks_command)
app.command("compare")(compare_command)
