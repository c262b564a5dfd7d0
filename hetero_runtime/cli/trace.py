"""`hetero-runtime trace`: record what the routers of a model say."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetero_runtime.cli import sampling
from hetero_runtime.cli.errors import INTERRUPTED, exit_on_error
from hetero_runtime.cli.options import ConfigOption, JsonOption, ModelArgument, SetOption

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.table import Table

    from hetero_runtime.config import ResolvedConfig
    from hetero_runtime.trace import RoutingFacts
    from hetero_runtime.trace.progress import TraceProgress
    from hetero_runtime.trace.recorder import Recorded


@exit_on_error
def trace_command(
    prompts: Annotated[
        Path,
        typer.Option("--prompts", help='Texts parted by blank lines, or a .jsonl with "text".'),
    ],
    out: Annotated[Path, typer.Option("--out", help="Safetensors file to write.")],
    model: ModelArgument = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
    is_teacher_forced: Annotated[
        bool, typer.Option("--teacher-forced", help="Take the texts' own tokens, generate none.")
    ] = False,
    max_tokens: sampling.MaxTokens = 256,
    temperature: sampling.Temperature = 0.8,
    seed: Annotated[int, typer.Option(help="Document d is sampled with seed + d.")] = 0,
    cut: Annotated[int | None, typer.Option("--cut", help="Keep this many tokens of each text.")] = None,
    asks_early: Annotated[
        bool, typer.Option("--early", help="Also record each router on the input of the layer before.")
    ] = False,
) -> None:
    """Record the routing of MODEL on the texts of a file; run again after an interruption to go on."""
    from rich.console import Console

    from hetero_runtime.cli.loading import plan_to_load
    from hetero_runtime.cli.options import config_of
    from hetero_runtime.config.mode import eager_unless_named
    from hetero_runtime.trace import RoutingFacts
    from hetero_runtime.trace.documents import read_documents
    from hetero_runtime.whole_file import check_folder

    check_folder(out)
    texts = read_documents(prompts)
    planned = plan_to_load(eager_unless_named(config_of(model, config, overrides)))
    recorded = _record(
        planned.config,
        texts,
        out,
        is_teacher_forced=is_teacher_forced,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        cut=cut,
        asks_early=asks_early,
    )
    facts = RoutingFacts.of(recorded.trace)
    Console(stderr=as_json).print(_table(recorded, facts))
    if as_json:
        typer.echo(json.dumps(_report(out, recorded, facts)))


def _record(config: ResolvedConfig, texts: list[str], out: Path, **settings: Any) -> Recorded:
    """`settings`: fields of TraceSettings."""
    from hetero_runtime.cli.progress import BytesProgress
    from hetero_runtime.hf.console import keep_quiet
    from hetero_runtime.trace.progress import Watch
    from hetero_runtime.trace.recorder import TraceSettings, record_trace

    keep_quiet()
    chosen = TraceSettings(**settings)
    try:
        with _documents_bar() as recording:
            watch = Watch(loading=lambda: BytesProgress("reading experts"), recording=recording)
            return record_trace(config, texts, out, settings=chosen, watch=watch)
    except KeyboardInterrupt:
        typer.echo("interrupted; documents that are done are kept: run the same command to go on", err=True)
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def _documents_bar() -> Iterator[Callable[[TraceProgress], None]]:
    """A bar of documents, tokens a second and time left, on standard error where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns = (TextColumn("documents"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"))
    bar = Progress(*columns, console=console, disable=not console.is_terminal)
    task = bar.add_task("documents", total=None, speed="")

    def draw(at: TraceProgress) -> None:
        bar.start()  # not before: experts are read under a bar of their own
        left = "" if at.left_s is None else f", {at.left_s:,.0f} s left"
        speed = f"{at.tok_s:,.1f} tokens a second{left}"
        bar.update(task, completed=at.documents, total=at.num_documents, speed=speed)

    try:
        yield draw
    finally:
        bar.stop()


def _table(recorded: Recorded, facts: RoutingFacts) -> Table:
    from rich.table import Table

    trace, info = recorded
    decoding = info.decoding + (f" at {info.temperature}" if info.decoding == "sampled" else "")
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_row("tokens", f"{trace.num_tokens:,}")
    table.add_row("documents", f"{len(trace.bounds) - 1:,}")
    table.add_row("routers", f"{trace.num_layers} × {trace.num_experts} experts, top-{trace.top_k}")
    table.add_row("load entropy", f"{facts.load_entropy:.3f} (1: every expert alike)")
    table.add_row("same expert again", f"{facts.persistence:.1%} (by chance {facts.by_chance:.1%})")
    table.add_row("decoding", decoding)
    return table


def _report(out: Path, recorded: Recorded, facts: RoutingFacts) -> dict[str, Any]:
    from dataclasses import asdict

    trace = recorded.trace
    return {
        "out": str(out),
        "tokens": trace.num_tokens,
        "documents": len(trace.bounds) - 1,
        "num_layers": trace.num_layers,
        "num_experts": trace.num_experts,
        "top_k": trace.top_k,
        **facts._asdict(),
        **asdict(recorded.info),
    }
