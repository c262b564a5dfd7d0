"""`hetero-runtime calibrate routing MODEL --text FILE`: what routing policies need to know of its routers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetero_runtime.cli.calibrate.out import OutOption, file_to_write
from hetero_runtime.cli.errors import exit_on_error
from hetero_runtime.cli.evaluation.options import TextOption, loaded
from hetero_runtime.cli.options import ConfigOption, JsonOption, ModelArgument, SetOption

if TYPE_CHECKING:
    from hetero_runtime.calibration.measure import Measured
    from hetero_runtime.config import Config
    from hetero_runtime.evaluation.base import TokenIds


@exit_on_error
def calibrate_routing_command(
    text: TextOption,
    out: OutOption = None,
    model: ModelArgument = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a window, read as a text of its own.")] = 1024,
    windows: Annotated[
        int | None, typer.Option(min=1, help="This many windows, evenly over the text. None: all.")
    ] = None,
    priors: Annotated[
        int, typer.Option("--priors", min=0, help="The most frequent tokens get a prior each; so many.")
    ] = 4096,
    as_json: JsonOption = False,
) -> None:
    """Measure score ranges, warm set and token priors of MODEL on text that nothing is evaluated on."""
    from rich.console import Console

    from hetero_runtime.calibration import CALIBRATION_SUFFIX
    from hetero_runtime.cli.options import config_of
    from hetero_runtime.evaluation.texts import read_texts

    chosen = config_of(model, config, overrides)
    path = file_to_write(out, chosen, CALIBRATION_SUFFIX)
    rows = _rows(chosen, read_texts(text), length=length, windows=windows)
    measured = _measure(chosen, rows, num_priors=priors)
    _write(path, chosen, measured, text=text)
    report = _report(path, measured)
    console = Console(stderr=as_json)
    for name, value in report.items():
        console.print(f"{name.replace('_', ' ')}: {value}", highlight=False)
    if as_json:
        typer.echo(json.dumps(report))


def _rows(config: Config, texts: list[str], *, length: int, windows: int | None) -> list[TokenIds]:
    from hetero_runtime.config import model_dir
    from hetero_runtime.evaluation.texts import cut_rows, spread, tokenise
    from hetero_runtime.hf.console import keep_quiet
    from hetero_runtime.hf.tokens import load_tokenizer

    keep_quiet()
    documents = tokenise(texts, load_tokenizer(model_dir(config)))
    return spread(cut_rows(documents, min(length, config.execution.max_length - 1)), windows)


def _measure(config: Config, rows: list[TokenIds], *, num_priors: int) -> Measured:
    from hetero_runtime.calibration.measure import measure
    from hetero_runtime.cli.progress import count_progress
    from hetero_runtime.evaluation.configuration import exactly_routed

    with loaded(exactly_routed(config)) as parts, count_progress("tokens") as seen:
        return measure(parts, rows, num_priors=num_priors, seen=seen)


def _write(path: Path, config: Config, measured: Measured, *, text: Path) -> None:
    from hetero_runtime.calibration import write_calibration
    from hetero_runtime.config import model_dir
    from hetero_runtime.plan import read_geometry
    from hetero_runtime.prediction import RouterFingerprint

    fingerprint = RouterFingerprint.of_model(read_geometry(model_dir(config)))
    notes = {"text": text.name, "num_tokens": measured.num_tokens}
    write_calibration(path, measured.calibration, fingerprint=fingerprint, notes=notes)


def _report(path: Path, measured: Measured) -> dict[str, Any]:
    calibration = measured.calibration
    return {
        "written_to": str(path),
        "bytes": path.stat().st_size,
        "tokens_read": measured.num_tokens,
        "tokens_with_a_prior": len(calibration.prior.tokens),
        "of_the_text": round(measured.known, 4),
        "mean_range_of_scores": [round(each, 4) for each in calibration.score_range.tolist()],
    }
