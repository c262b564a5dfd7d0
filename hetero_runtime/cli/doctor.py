"""`hetero-runtime doctor`: what this machine gives the runtime, and what that means."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetero_runtime.cli.errors import exit_on_error
from hetero_runtime.cli.options import JsonOption


@exit_on_error
def doctor_command(
    path: Annotated[
        Path | None,
        typer.Argument(
            help="A model's folder, to measure the disk below it; the current folder when absent."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure GPU, link, memory, disk, instruction sets and limits; say what each means."""
    from rich.console import Console

    from hetero_runtime.doctor import examine
    from hetero_runtime.doctor.report import print_table, to_json
    from hetero_runtime.errors import CheckpointError

    if path is not None and not path.exists():
        raise CheckpointError(f"{path} does not exist: name a model's folder, or none for the current one")
    with Console(stderr=True).status("looking at this machine") as status:
        findings = examine(path, on_start=lambda name: status.update(f"measuring: {name}"))
    if as_json:
        typer.echo(to_json(findings))
    else:
        print_table(findings, Console())
