"""Load an engine for a command: plan first, then a progress bar while the experts are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hetero_runtime.engine import Engine
    from hetero_runtime.planned import Planned


def load_engine(planned: Planned) -> Engine:
    """The engine of `planned`; the bar goes to standard error."""
    from hetero_runtime.assembly import assemble
    from hetero_runtime.cli.progress import BytesProgress
    from hetero_runtime.engine import Engine
    from hetero_runtime.hf.console import keep_quiet

    keep_quiet()
    with BytesProgress("reading experts") as progress:
        return Engine(assemble(planned.config, progress=progress))
