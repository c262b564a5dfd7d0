"""How a command ends when the user must change something: the message in red, exit code 2."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import typer

from hetero_runtime.errors import HeteroError

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended."""

P = ParamSpec("P")
R = TypeVar("R")


def exit_on_error(command: Callable[P, R]) -> Callable[P, R]:
    """Wrap a command: a HeteroError becomes its message on stderr and exit code 2, without a traceback."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except HeteroError as error:
            typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
            raise typer.Exit(2) from error

    return wrapped
