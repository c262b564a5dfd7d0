"""`hetero-runtime pack MODEL --out FILE`: the routed experts in one aligned file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetero_runtime.cli.errors import INTERRUPTED, exit_on_error
from hetero_runtime.cli.options import ConfigOption, JsonOption, ModelArgument, SetOption

if TYPE_CHECKING:
    from rich.table import Table

    from hetero_runtime.config import ResolvedConfig
    from hetero_runtime.expert_file.pack import PackResult


@exit_on_error
def pack_command(
    out: Annotated[Path, typer.Option("--out", help="Expert file to write.")],
    model: ModelArgument = None,
    order: Annotated[
        Path | None,
        typer.Option("--order", metavar="TRACE", help="Lay experts that it uses together side by side."),
    ] = None,
    is_verified: Annotated[
        bool, typer.Option("--verify", help="Write nothing: hold the file to MODEL and to its checksums.")
    ] = False,
    config: ConfigOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the routed experts of MODEL once, aligned for direct reads; run again after an interruption to
    go on.

    `--set model.experts=int8` quantises them. The engine reads the file with memory.expert_file.
    """
    from rich.console import Console

    from hetero_runtime.cli.options import config_of
    from hetero_runtime.cli.progress import BytesProgress
    from hetero_runtime.config import model_dir
    from hetero_runtime.plan import read_geometry
    from hetero_runtime.planned import decide
    from hetero_runtime.whole_file import check_folder

    check_folder(out)
    chosen = config_of(model, config, overrides)
    read_geometry(model_dir(chosen))
    from hetero_runtime.expert_file.pack import for_packing, pack  # torch: not before all that can be wrong
    from hetero_runtime.hf.console import keep_quiet

    keep_quiet()
    resolved = decide(for_packing(chosen)).config
    if is_verified:
        _verify(resolved, out, as_json=as_json)
        return
    try:
        with BytesProgress("packing experts") as progress:
            result = pack(resolved, out, trace=order, progress=progress)
    except KeyboardInterrupt:
        typer.echo("interrupted; what is written is kept: run the same command to go on", err=True)
        raise typer.Exit(INTERRUPTED) from None
    Console(stderr=as_json).print(_table(result))
    if as_json:
        typer.echo(json.dumps(_report(result)))


def _verify(config: ResolvedConfig, out: Path, *, as_json: bool) -> None:
    """Read the whole file; what is wrong with it is an error."""
    from hetero_runtime.checkpoint import Checkpoint
    from hetero_runtime.cli.progress import BytesProgress
    from hetero_runtime.expert_file import ExpertFile
    from hetero_runtime.expert_file.source import check_sources

    with ExpertFile.open(out) as file, BytesProgress("verifying experts") as progress:
        check_sources(out, file.header.sources, Checkpoint.open(config.model.path))
        file.verify(threads=2 * config.cpu.threads, progress=progress)
        num_records = file.header.num_records
    typer.echo(f"{out}: of this model as it is now, and all {num_records:,} records are whole", err=as_json)
    if as_json:
        typer.echo(json.dumps({"path": str(out), "num_records": num_records, "is_whole": True}))


def _table(result: PackResult) -> Table:
    from rich.table import Table

    from hetero_runtime.cli.summary import in_words
    from hetero_runtime.config.sizes import format_size

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_row("file", f"{result.path}, {format_size(result.num_bytes)}")
    resumed = f", {result.num_resumed:,} of them by an earlier run" if result.num_resumed else ""
    table.add_row("records", f"{result.num_records:,}{resumed}")
    rate = result.written_bytes / max(result.seconds, 1e-9)
    table.add_row("time", f"{result.seconds:,.1f} s, {format_size(round(rate))} a second")
    if result.errors is not None:
        table.add_row("error of the weights", in_words(result.errors))
    return table


def _report(result: PackResult) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(result) | {"path": str(result.path)}
