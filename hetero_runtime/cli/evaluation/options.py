"""Options that the evaluations share, and the harness that they run on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hetero_runtime.assembly import Parts
    from hetero_runtime.config import Config

TextOption = Annotated[
    Path,
    typer.Option("--text", help='A text file, a .jsonl with "text" a line, or a folder of them.'),
]
LengthOption = Annotated[int, typer.Option("--length", help="Tokens predicted in each window.")]
WindowsOption = Annotated[
    int | None, typer.Option("--windows", help="This many windows, evenly over the text. None: all.")
]
RowsOption = Annotated[
    int, typer.Option("--rows", help="Most rows of a pass; fewer where their logits take too much memory.")
]


@contextmanager
def loaded(config: Config) -> Iterator[Parts]:
    """The parts of an engine for `config`, driven as evaluations need, until the context is left."""
    from hetero_runtime.assembly import assemble
    from hetero_runtime.cli.progress import BytesProgress
    from hetero_runtime.evaluation.configuration import for_evaluation
    from hetero_runtime.hf.console import keep_quiet
    from hetero_runtime.planned import plan_for

    keep_quiet()
    planned = plan_for(for_evaluation(config))
    with BytesProgress("reading experts") as progress:
        parts = assemble(planned.config, progress=progress)
    try:
        yield parts
    finally:
        parts.close()
