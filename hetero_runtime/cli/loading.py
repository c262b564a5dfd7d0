"""Load an engine for a command: plan first, then a progress bar while the experts are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from rich.console import Console

    from hetero_runtime.config import Config
    from hetero_runtime.engine import Engine
    from hetero_runtime.planned import Planned


CAPTURING = "capturing the decode step (on a fresh machine its kernels compile first, which takes seconds)"


def plan_to_load(config: Config) -> Planned:
    """What `plan_for` decides, of a model that has a tokenizer: all that can be wrong without torch is told
    before a command imports it. Raises as `plan_for`."""
    from hetero_runtime.checkpoint.tokenizer_files import check_tokenizer_files
    from hetero_runtime.planned import plan_for

    planned = plan_for(config)
    check_tokenizer_files(planned.config.model.path)
    return planned


def load_engine(planned: Planned) -> Engine:
    """The engine of `planned`; the bar goes to standard error."""
    from hetero_runtime.assembly import assemble
    from hetero_runtime.cli.progress import BytesProgress
    from hetero_runtime.engine import Engine
    from hetero_runtime.hf.console import keep_quiet

    keep_quiet()
    then = CAPTURING if planned.config.execution.mode == "graph" else ""
    with BytesProgress("reading experts", then=then) as progress:
        return Engine(assemble(planned.config, progress=progress))


def open_engine(
    planned: Planned, make: Callable[[Mapping[str, Any] | None], Config], console: Console
) -> Engine:
    """The engine of `planned`; with `preset: auto` the one that short runs choose, and why, to `console`.

    `make`: the configuration with sections beneath what the user wrote; with None the one that was planned.
    """
    if make(None).preset != "auto":
        return load_engine(planned)
    from hetero_runtime.cli.progress import BytesProgress
    from hetero_runtime.engine import Engine
    from hetero_runtime.hf.console import keep_quiet
    from hetero_runtime.tuning import find_candidates, settle

    keep_quiet()
    with BytesProgress("reading experts", then="trying what could be fastest, for some seconds") as progress:
        settled = settle(find_candidates(make), progress=progress)
    console.print("preset: auto", *settled.choice.lines(), "", sep="\n", highlight=False)
    return Engine(settled.parts)
