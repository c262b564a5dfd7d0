"""`hetero-runtime calibrate lookahead MODEL --text FILE`: a predictor for preset vismmoe."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetero_runtime.cli.calibrate.out import OutOption, file_to_write
from hetero_runtime.cli.errors import exit_on_error
from hetero_runtime.cli.evaluation.options import loaded
from hetero_runtime.cli.options import ConfigOption, JsonOption, ModelArgument, SetOption

if TYPE_CHECKING:
    from rich.table import Table

    from hetero_runtime.config import Config
    from hetero_runtime.lookahead.gather import GatherOptions
    from hetero_runtime.lookahead.lessons import Source
    from hetero_runtime.lookahead.train import LookaheadReport, Progress
    from hetero_scheduler.predict.lookahead_features import Passes
    from hetero_scheduler.predict.lookahead_recall import HotRecall
    from hetero_scheduler.predict.lookahead_training import LookaheadProgress


@exit_on_error
def calibrate_lookahead_command(
    text: Annotated[
        Path,
        typer.Option(
            "--text", help='A text file, or a .jsonl with "text" or "messages" (images too) a line.'
        ),
    ],
    out: OutOption = None,
    model: ModelArgument = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    length: Annotated[int, typer.Option(min=4, help="Tokens of a text, the rest is left out.")] = 512,
    tokens: Annotated[int, typer.Option(min=1, help="Single tokens learnt from, of each text.")] = 128,
    max_new: Annotated[
        int, typer.Option("--max-tokens", min=0, help="Written by the model where messages end unanswered.")
    ] = 32,
    epochs: Annotated[int, typer.Option(min=1, help="At most.")] = 40,
    minutes: Annotated[float | None, typer.Option(min=0.01, help="Of training, at most.")] = None,
    width: Annotated[int, typer.Option(min=1, help="Units of each layer's bottleneck.")] = 128,
    seed: Annotated[int, typer.Option(help="Of the split, the weights, the order and answers.")] = 0,
    compares: Annotated[
        bool, typer.Option("--compare", help="Also measure one that sees no images.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Read TEXT with MODEL, learn which experts its next layers want, print the recall on texts that were not
    learnt from, keep the predictor."""
    from rich.console import Console

    from hetero_runtime.cli.options import config_of
    from hetero_runtime.lookahead import LOOKAHEAD_SUFFIX
    from hetero_runtime.lookahead.lessons import read_lessons

    chosen = config_of(model, config, overrides)
    path = file_to_write(out, chosen, LOOKAHEAD_SUFFIX)
    sources = read_lessons(text)
    from hetero_runtime.lookahead.gather import GatherOptions  # torch: not before all that can be wrong
    from hetero_scheduler.predict.lookahead_training import LookaheadOptions

    asked = GatherOptions(tokens, max_new, seed=seed)
    passes, top_k = _gather(chosen, sources, length=length, options=asked)
    options = LookaheadOptions(seed=seed, epochs=epochs, minutes=minutes, width=width)
    report = _train(chosen, passes, path, top_k=top_k, options=options, compares_visual=compares)
    console = Console(stderr=as_json)
    console.print(_facts(report))
    for title, recalls in (("single tokens", report.tokens), ("prompts", report.prompts)):
        console.print(_recall_table(title, recalls, report))
    if as_json:
        typer.echo(json.dumps(_json(report)))


def _gather(
    config: Config, sources: Sequence[Source], *, length: int, options: GatherOptions
) -> tuple[Passes, int]:
    """Passes of the model over the texts, and its top-k."""
    from hetero_runtime.cli.progress import count_progress
    from hetero_runtime.evaluation.configuration import exactly_routed
    from hetero_runtime.hf.router_hooks import router_top_k
    from hetero_runtime.lookahead.gather import gather
    from hetero_runtime.lookahead.lessons import encode_lessons
    from hetero_runtime.prompt import PromptReader

    with loaded(exactly_routed(config)) as parts, count_progress("texts") as seen:
        reader = PromptReader(
            parts.config.model.path,
            tokenizer=parts.tokenizer,
            config=parts.model.config,
            has_images=parts.architecture.has_images,
            max_length=parts.config.execution.max_length,
        )
        lessons = encode_lessons(sources, reader, parts.tokenizer, length=length)
        return gather(parts, lessons, options=options, seen=seen), router_top_k(parts.model)


def _train(config: Config, passes: Passes, path: Path, **how: Any) -> LookaheadReport:
    from hetero_runtime.config import model_dir
    from hetero_runtime.lookahead.train import train_from_passes
    from hetero_runtime.plan import read_geometry
    from hetero_runtime.prediction import RouterFingerprint

    fingerprint = RouterFingerprint.of_model(read_geometry(model_dir(config)))
    with _epochs_bar() as progress:
        return train_from_passes(passes, path, fingerprint=fingerprint, progress=progress, **how)


@contextmanager
def _epochs_bar() -> Iterator[Progress]:
    """A bar of epochs with losses, on standard error where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("training", total=None)

        def draw(name: str, at: LookaheadProgress) -> None:
            loss = f"loss {at.train_loss:.4f}, held out {at.validation_loss:.4f} (best {at.best_loss:.4f})"
            bar.update(task, total=at.epochs, completed=at.epoch, description=f"{name}: {loss}")

        yield draw


def _facts(report: LookaheadReport) -> Table:
    from rich.table import Table

    documents = ", ".join(f"{count:,} {use}" for use, count in report.num_documents.items())
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_row("passes", f"{report.num_passes:,}, of them {report.num_prompts:,} prompts")
    table.add_row("load entropy", f"{report.load_entropy:.3f} (1: every expert alike)")
    table.add_row("texts", documents)
    table.add_row("images", "seen" if report.has_images else "none: no visual feature")
    table.add_row("predictor", f"{report.num_parameters:,} parameters, {report.file_bytes / 1e6:.2f} MB")
    table.add_row("layers that say enough of what comes", str(report.semantic_depth))
    table.add_row("written to", str(report.out))
    return table


def _recall_table(title: str, recalls: Sequence[HotRecall], report: LookaheadReport) -> Table:
    """A row a predictor and distance; distance 0 is the mean of all."""
    from rich.table import Table

    most = f"; no predictor finds more than {report.most[0]:.0%} at {report.counts[0]}"
    ceiling = most if report.most[0] < 1 and title == "single tokens" else ""
    table = Table(title=f"hot recall, {title}, on texts that were not learnt from{ceiling}")
    for column in ("predictor", "layers ahead", *(f"at {count}" for count in report.counts)):
        table.add_column(column)
    for recall in recalls:
        shares = (f"{share:.1%}" for share in recall.at)
        table.add_row(recall.predictor, str(recall.distance or "all"), *shares)
    return table


def _json(report: LookaheadReport) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(report) | {"out": str(report.out)}
