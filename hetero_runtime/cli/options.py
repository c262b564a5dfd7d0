"""Options that several commands share, and the configuration that they mean."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hetero_runtime.config import Config

ModelArgument = Annotated[
    str | None,
    typer.Argument(help="Folder of a Hugging Face checkpoint. None: model.path, or the bundled model."),
]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="YAML file.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override, such as memory.slabs=64. Repeatable."),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="The last line of standard output is one JSON object.")
]
ProfileOption = Annotated[
    Path | None,
    typer.Option(
        "--profile", metavar="FILE", help="Chrome trace of the run (.json or .json.gz), for ui.perfetto.dev."
    ),
]


def recording_to(file: Path | None) -> AbstractContextManager[None]:
    """What `--profile` means; see `profiling.trace_to`."""
    if file is None:
        return nullcontext()
    from hetero_runtime.profiling import trace_to

    return trace_to(file)


def config_of(
    model: str | None,
    file: Path | None,
    overrides: list[str] | None,
    beneath: Mapping[str, Any] | None = None,
) -> Config:
    """The configuration that the shared options mean; a model on the command line wins over the file's.
    `beneath`: as for `load_config`."""
    from dataclasses import replace

    from hetero_runtime.config import load_config

    config = load_config(file, overrides=overrides or (), beneath=beneath)
    return config if model is None else replace(config, model=replace(config.model, path=model))


def demo_config_of(
    model: str | None,
    file: Path | None,
    overrides: list[str] | None,
    beneath: Mapping[str, Any] | None = None,
) -> Config:
    """As `config_of`. The bundled model fits anywhere; unless told otherwise it runs with a quarter of its
    experts resident, and if nothing is said at all by its predictor's forecasts, so that what the runtime
    does can be seen."""
    from dataclasses import replace

    is_silent = model is None and file is None and not overrides
    config = config_of(model, file, ["preset=seqmoe"] if is_silent else overrides, beneath)
    memory = config.memory
    if config.model.path is not None or memory.slabs != "auto" or memory.residency is not None:
        return config
    return replace(config, memory=replace(memory, residency=0.25))
