"""`hetero-runtime train-predictor TRACE`: learn which experts the coming steps will use."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetero_runtime.cli.errors import exit_on_error
from hetero_runtime.cli.options import JsonOption

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

    from hetero_runtime.prediction.train import TrainingReport, TrainingWatch
    from hetero_scheduler.predict.refinement_training import RefinementProgress
    from hetero_scheduler.predict.training import TrainingProgress

SHOWN_DISTANCES = (1, 2, 4, 8)


@exit_on_error
def train_predictor_command(
    trace: Annotated[Path, typer.Argument(help="Trace that `hetero-runtime trace` recorded.")],
    out: Annotated[Path, typer.Option("--out", help="Safetensors file to write.")],
    epochs: Annotated[int, typer.Option(min=1, help="At most, in each of two stages.")] = 60,
    minutes: Annotated[
        float | None, typer.Option(min=0.01, help="In all; the last epochs begun are finished.")
    ] = None,
    groups: Annotated[int, typer.Option(min=1, help="Models, each for a run of layers.")] = 2,
    width: Annotated[int, typer.Option(min=32, help="Hidden features; a multiple of 32.")] = 96,
    token_rank: Annotated[
        int, typer.Option("--token-rank", min=0, help="Numbers learned of each token; 0 learns none.")
    ] = 64,
    kept: Annotated[
        Path | None,
        typer.Option("--refine", help="Train no models: learn for these of this model what tokens add."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the split, the weights and the order.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Train the Mamba2 predictor on TRACE, print its recall on documents that it has not seen, keep it."""
    from rich.console import Console

    from hetero_runtime.errors import ConfigError
    from hetero_runtime.prediction.train import train_from_trace
    from hetero_scheduler.predict.mamba2_block import Mamba2Sizes
    from hetero_scheduler.predict.mamba2_training import PredictorShape
    from hetero_scheduler.predict.refinement_training import RefinementOptions
    from hetero_scheduler.predict.training import TrainingOptions

    if kept is not None and not token_rank:
        raise ConfigError(f"--refine {kept} with --token-rank 0 learns nothing; leave one of them out")
    try:
        sizes = Mamba2Sizes(d_model=width, state_size=32, head_dim=32)
    except ValueError as error:
        raise ConfigError(f"--width {width}: {error}") from error
    with _epochs_bar(groups, epochs) as watch:
        report = train_from_trace(
            trace,
            out,
            shape=PredictorShape(num_groups=groups, sizes=sizes),
            options=TrainingOptions(seed=seed, epochs=epochs, minutes=minutes),
            refining=RefinementOptions(rank=token_rank, seed=seed) if token_rank else None,
            kept=kept,
            device=device,
            watch=watch,
        )
    console = Console(stderr=as_json)
    console.print(_facts(report))
    console.print(_recall_table(report))
    if as_json:
        typer.echo(json.dumps(_json(report)))


@contextmanager
def _epochs_bar(groups: int, epochs: int) -> Iterator[TrainingWatch]:
    """A bar of epochs with losses and time, on standard error where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from hetero_runtime.prediction.train import TrainingWatch

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading the trace", total=epochs)

        def draw(group: int, at: TrainingProgress) -> None:
            loss = f"loss {at.train_loss:.3f}, held out {at.validation_loss:.3f} (best {at.best_loss:.3f})"
            description = f"group {group + 1} of {groups}, {at.stage}: {loss}"
            bar.update(task, completed=at.epoch, description=description)

        def draw_refining(at: RefinementProgress) -> None:
            best = f"best {at.best_loss:.3f}, at first {at.first_loss:.3f}"
            description = f"what tokens and routers add: held out {at.validation_loss:.3f} ({best})"
            bar.update(task, total=at.epochs, completed=at.epoch, description=description)

        yield TrainingWatch(draw, draw_refining)


def _facts(report: TrainingReport) -> Table:
    from rich.table import Table

    documents = ", ".join(f"{count:,} {use}" for use, count in report.num_documents.items())
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_row("trace", f"{report.num_tokens:,} tokens, {report.decoding}")
    table.add_row("load entropy", f"{report.load_entropy:.3f} (1: every expert alike)")
    table.add_row("documents", documents)
    table.add_row("predictor", f"{report.num_parameters:,} parameters, {report.file_bytes / 1e6:.2f} MB")
    table.add_row("written to", str(report.out))
    return table


def _recall_table(report: TrainingReport) -> Table:
    """Recall on the test documents, a row a predictor and distance."""
    from rich.table import Table

    title = f"recall on test documents (a guess: {report.by_chance:.1%} at k)"
    table = Table("steps ahead", "predictor", "at k", "at k + 3", "at 2k", title=title)
    for recall in report.recalls:
        if recall.distance in SHOWN_DISTANCES:
            shares = (f"{share:.1%}" for share in (recall.at_k, recall.at_k3, recall.at_2k))
            ends_section = recall.predictor == report.recalls[-1].predictor
            table.add_row(str(recall.distance), recall.predictor, *shares, end_section=ends_section)
    return table


def _json(report: TrainingReport) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(report) | {"out": str(report.out)}
