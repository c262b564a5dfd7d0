"""`hetero-runtime eval copies TRACE`: what routing policies would have copied on a recorded trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hetero_runtime.cli.errors import exit_on_error
from hetero_runtime.cli.evaluation.options import (
    BonusOption,
    InsertionsOption,
    PoliciesOption,
    ResidencyOption,
    WindowOption,
    grid_of,
)
from hetero_runtime.cli.listed import numbers
from hetero_runtime.cli.options import JsonOption


@exit_on_error
def copies_command(
    trace: Annotated[Path, typer.Argument(help="Trace that `hetero-runtime trace` recorded.")],
    policies: PoliciesOption = "exact,exact_a,cache_prior,psr",
    bonus: BonusOption = "0.1,0.2,0.3",
    insertions: InsertionsOption = "1,2",
    window: WindowOption = "2",
    residency: ResidencyOption = "0.5,0.25",
    calibrated: Annotated[
        float, typer.Option("--calibrated", help="Share of the tokens, the first ones, that calibrate.")
    ] = 0.3,
    as_json: JsonOption = False,
) -> None:
    """Copies a token of routing policies on TRACE, without its model.

    A trace does not hold what the next layer's router would have said a layer early: policies that look ahead
    get its true scores, so theirs are the copies of a guess that is never wrong.
    """
    from rich.console import Console

    from hetero_runtime.cli.progress import count_progress
    from hetero_runtime.evaluation.frontier import render_points, to_json
    from hetero_runtime.evaluation.frontier.replay import divide, replay
    from hetero_runtime.trace import read_trace

    contenders = grid_of(policies, bonus, insertions=insertions, window=window).contenders()
    recorded, _ = read_trace(trace)
    halves = divide(recorded, calibrated)
    with count_progress("points") as done:
        points = replay(halves, contenders, numbers(residency, "--residency"), done=done)
    entropy = halves.replayed.load_entropy()
    Console(stderr=as_json).print(render_points(points, entropy=entropy))
    if as_json:
        typer.echo(json.dumps(to_json(points, entropy=entropy)))
