"""The command line. Each command lives in a module of its own, which imports what is heavy when it runs."""

from __future__ import annotations

import typer

from hetero_runtime.cli.calibrate import app as calibrate_app
from hetero_runtime.cli.chat import chat_command
from hetero_runtime.cli.config import config_command
from hetero_runtime.cli.doctor import doctor_command
from hetero_runtime.cli.evaluation import app as evaluation_app
from hetero_runtime.cli.pack import pack_command
from hetero_runtime.cli.plan import plan_command
from hetero_runtime.cli.run import run_command
from hetero_runtime.cli.simulate import simulate_command
from hetero_runtime.cli.trace import trace_command
from hetero_runtime.cli.train_predictor import train_predictor_command
from hetero_runtime.cli.verify import verify_command

app = typer.Typer(
    name="hetero-runtime",
    help="Run Mixture-of-Experts models whose experts do not fit on the device.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("run")(run_command)
app.command("chat")(chat_command)
app.command("plan")(plan_command)
app.command("doctor")(doctor_command)
app.command("config")(config_command)
app.command("verify")(verify_command)
app.command("pack")(pack_command)
app.command("trace")(trace_command)
app.command("simulate")(simulate_command)
app.command("train-predictor")(train_predictor_command)
app.add_typer(calibrate_app, name="calibrate")
app.add_typer(evaluation_app, name="eval")


def main() -> None:
    """Entry point of `hetero-runtime` and of `python -m hetero_runtime`."""
    app()
