"""`hetero-runtime eval frontier MODEL`: what routing policies save in copies, and what that costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from hetero_runtime.cli.errors import exit_on_error
from hetero_runtime.cli.evaluation.options import (
    BonusOption,
    InsertionsOption,
    LengthOption,
    PoliciesOption,
    ResidencyOption,
    RowsOption,
    SamplesOption,
    SeedOption,
    WindowOption,
    check_samples,
    grid_of,
    loaded,
    plan_of,
    samples_of,
)
from hetero_runtime.cli.listed import numbers
from hetero_runtime.cli.options import ConfigOption, JsonOption, ModelArgument, SetOption

if TYPE_CHECKING:
    from hetero_runtime.assembly import Parts
    from hetero_runtime.config import Config
    from hetero_runtime.evaluation import TokenIds
    from hetero_runtime.evaluation.frontier import Texts
    from hetero_runtime.evaluation.frontier.base import Contender, Point
    from hetero_scheduler.routing import Calibration


@exit_on_error
def frontier_command(
    model: ModelArgument = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    policies: PoliciesOption = "exact,exact_a,cache_prior,psr",
    bonus: BonusOption = "0.05,0.1,0.15,0.2,0.25,0.3,0.4",
    insertions: InsertionsOption = "1,2",
    window: WindowOption = "2",
    residency: ResidencyOption = "0.5,0.25",
    calibration: Annotated[
        str, typer.Option("--calibration", help="File of `calibrate`. auto: the one beside the model.")
    ] = "auto",
    samples: SamplesOption = None,
    length: LengthOption = 256,
    windows: Annotated[int, typer.Option("--windows", min=1, help="Windows of each text.")] = 16,
    seed: SeedOption = 0,
    text: Annotated[
        Path | None, typer.Option("--text", help="Held-out text: its perplexity stands beside.")
    ] = None,
    timed: Annotated[
        int,
        typer.Option("--timed", help="Tokens that the engine decodes under each policy, timed. 0: none."),
    ] = 0,
    rows: RowsOption = 16,
    plot: Annotated[Path | None, typer.Option("--plot", help="PNG to draw: divergence by copies.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Sweep routing policies: divergence from the exact MODEL against copies a token.

    Options that may name several take them with commas between. What is counted follows from tokens and
    policy alone; this machine's memory and speed change nothing in it.
    """
    from rich.console import Console

    from hetero_runtime.calibration import read_calibration
    from hetero_runtime.cli.options import config_of
    from hetero_runtime.evaluation.configuration import exact
    from hetero_runtime.evaluation.frontier import draw_frontier, render_points, to_json
    from hetero_runtime.evaluation.frontier.report import load_entropy
    from hetero_runtime.evaluation.texts import read_texts
    from hetero_runtime.whole_file import check_folder

    contenders = grid_of(policies, bonus, insertions=insertions, window=window).contenders()
    asked = config_of(model, config, overrides)
    plan_of(exact(asked))
    check_samples(samples)
    if plot is not None:
        check_folder(plot)
    file = _calibration(asked, calibration)
    known = read_calibration(file).calibration
    held_out = () if text is None else tuple(read_texts(text))
    reading = _Reading(samples, length, windows, seed, held_out, rows)
    points, texts = _sweep(asked, contenders, numbers(residency, "--residency"), known=known, reading=reading)
    if timed:
        points = _timed(points, asked, texts, num_tokens=timed, calibration=file)
    entropy = load_entropy(known)
    Console(stderr=as_json).print(render_points(points, entropy=entropy))
    if plot is not None:
        draw_frontier(points, plot, title=_title(asked, points, entropy))
    if as_json:
        typer.echo(json.dumps(to_json(points, entropy=entropy)))


class _Reading(NamedTuple):
    """What is read under every policy."""

    samples: Path | None
    length: int
    windows: int
    seed: int
    held_out: tuple[str, ...]
    rows_at_once: int


class _Swept(NamedTuple):
    points: list[Point]
    texts: Texts


def _sweep(
    asked: Config,
    contenders: list[Contender],
    residencies: tuple[float, ...],
    *,
    known: Calibration,
    reading: _Reading,
) -> _Swept:
    """Points of the exact model of `asked`; its texts are drawn or read before."""
    from hetero_runtime.cli.progress import count_progress
    from hetero_runtime.evaluation.configuration import exact
    from hetero_runtime.evaluation.frontier import run_frontier

    with loaded(exact(asked)) as parts:
        texts = _texts(parts, reading)
        with count_progress("points") as done:
            points = run_frontier(parts, contenders, residencies, texts=texts, calibration=known, done=done)
    return _Swept(points, texts)


def _timed(
    points: list[Point], asked: Config, texts: Texts, *, num_tokens: int, calibration: Path
) -> list[Point]:
    """`points` with engine times, over the first tokens of the first window."""
    from hetero_runtime.cli.progress import count_progress
    from hetero_runtime.evaluation.frontier.timing import PROMPT, time_points

    rows = [texts.samples[0].ids[: PROMPT + num_tokens]]
    with count_progress("engines") as done:
        return time_points(points, asked, rows, calibration=str(calibration), done=done)


def _texts(parts: Parts, reading: _Reading) -> Texts:
    from hetero_runtime.cli.progress import count_progress
    from hetero_runtime.evaluation.frontier import Texts
    from hetero_runtime.evaluation.texts import cut_rows, spread, tokenise

    file, length, windows = reading.samples, reading.length, reading.windows
    with count_progress("tokens") as seen:
        samples = samples_of(parts, file, length=length, windows=windows, seed=reading.seed, seen=seen)
    held_out: list[TokenIds] = []
    if reading.held_out:
        documents = tokenise(reading.held_out, parts.tokenizer)
        held_out = spread(cut_rows(documents, length), windows)
    return Texts(samples, tuple(held_out), rows_at_once=reading.rows_at_once)


def _calibration(config: Config, file: str) -> Path:
    """The file that policies of this model read. Raises what `locate_calibration` raises."""
    from dataclasses import replace

    from hetero_runtime.calibration import locate_calibration
    from hetero_runtime.config import model_dir
    from hetero_runtime.plan import read_geometry

    asked = replace(config.routing, policy="psr", calibration=file)
    found = locate_calibration(asked, read_geometry(model_dir(config)))
    assert found is not None, "psr reads a calibration"
    return found


def _title(config: Config, points: list[Point], entropy: float) -> str:
    """What the picture says of model and text."""
    from hetero_runtime.config import model_dir

    divergence = points[0].divergence
    assert divergence is not None, "a model ran"
    read = f"{divergence.num_tokens:,} tokens of its own text in {divergence.num_windows} windows"
    return f"{model_dir(config).name}: {read}, load entropy {entropy:.3f}"
