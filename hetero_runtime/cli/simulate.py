"""`hetero-runtime simulate TRACE`: what caches and their policies would have made of a recorded routing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetero_runtime.cli.errors import exit_on_error
from hetero_runtime.cli.listed import numbers, words
from hetero_runtime.cli.options import JsonOption

if TYPE_CHECKING:
    from hetero_runtime.config.tree import Horizon
    from hetero_runtime.trace import TraceInfo
    from hetero_scheduler.predict import Predictor
    from hetero_scheduler.simulator import Machine
    from hetero_scheduler.trace import Trace

_TRAINED: dict[str, Horizon] = {"mamba2": "step", "mamba2_token": "token", "mamba2_layer": "layer"}
"""Names of a trained predictor, by how near its forecasts are made anew."""


@exit_on_error
def simulate_command(
    trace: Annotated[Path, typer.Argument(help="Trace that `hetero-runtime trace` recorded.")],
    residency: Annotated[str, typer.Option(help="Shares of all experts.")] = "0.15,0.25,0.35,0.45",
    eviction: Annotated[
        str, typer.Option(help="lru, lfu, lfru; belady (by forecast); oracle_belady, oracle_belady_8, …")
    ] = "lru,lfu,lfru,oracle_belady",
    schedule: Annotated[str, typer.Option(help="none, jsd, moe_infinity, promoe, edf, top_b")] = "none",
    predictor: Annotated[
        str,
        typer.Option(
            help="none, frequency, persistence; mamba2 (mamba2_token, mamba2_layer: nearer horizons too); "
            "oracle, oracle_next"
        ),
    ] = "none",
    predictor_file: Annotated[
        Path | None, typer.Option("--predictor-file", help="The trained predictor that mamba2 means.")
    ] = None,
    pool: Annotated[str, typer.Option(help="global, per_layer")] = "global",
    link_gb_s: Annotated[float, typer.Option("--link-gb-s", help="Link, 10^9 bytes a second.")] = 55.0,
    layer_ms: Annotated[float, typer.Option("--layer-ms", help="One layer, all resident.")] = 0.1,
    record_mb: Annotated[
        float, typer.Option("--record-mb", help="One expert, 10^6 bytes; as it stands, bf16 Qwen3-30B-A3B.")
    ] = 9.437184,
    forecast_ms: Annotated[float, typer.Option("--forecast-ms", help="Added by each forecast.")] = 0.0,
    in_flight: Annotated[int, typer.Option("--in-flight", help="Prefetches on the link at once.")] = 1,
    overtakes: Annotated[
        bool,
        typer.Option(
            "--overtakes",
            help="Demands overtake the copy on the link too, as in captured steps (graph mode).",
        ),
    ] = False,
    extra: Annotated[int, typer.Option(help="Experts prefetched a layer beyond top-k.")] = 3,
    uncounted: Annotated[float, typer.Option(help="Share of the tokens that only warm the cache.")] = 0.1,
    plot: Annotated[Path | None, typer.Option("--plot", help="PNG to draw: hits against residency.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Replay TRACE through every combination of residencies and policies.

    Options that may name several take them with commas between: `--residency 0.25,0.45`. Caches alone are
    replayed compiled, forecasts and prefetches at a hundredth of that speed.
    """
    from rich.console import Console

    from hetero_runtime.cli.progress import count_progress
    from hetero_runtime.simulation import Sweep, draw_hit_rates, render_results, run_sweep, to_json
    from hetero_runtime.trace import read_trace

    routing, info = read_trace(trace)
    sweep = Sweep(
        residencies=numbers(residency, "--residency"),
        evictions=words(eviction),
        schedules=words(schedule),
        predictors=words(predictor),
        pools=words(pool),  # type: ignore[arg-type]  # checked where a scenario is made
        extra=extra,
        uncounted=uncounted,
        machine=_machine(
            link_gb_s,
            layer_ms,
            record_mb=record_mb,
            forecast_ms=forecast_ms,
            in_flight=in_flight,
            overtakes=overtakes,
        ),
    )
    trained = _trained(sweep.predictors, predictor_file, routing, info)
    with count_progress("replays") as progress:
        results = run_sweep(routing, sweep, trained=trained, progress=progress)
    Console(stderr=as_json).print(render_results(results, info))
    if plot is not None:
        draw_hit_rates(results, info, plot)
    if as_json:
        typer.echo(json.dumps(to_json(results, info)))


def _machine(
    link_gb_s: float,
    layer_ms: float,
    *,
    record_mb: float,
    forecast_ms: float,
    in_flight: int,
    overtakes: bool,
) -> Machine:
    from hetero_runtime.errors import ConfigError
    from hetero_scheduler.simulator import Machine

    try:
        return Machine(
            layer_ms=layer_ms,
            record_bytes=round(record_mb * 1e6),
            link_gb_s=link_gb_s,
            copies_in_flight=in_flight,
            forecast_ms=forecast_ms,
            overtakes=overtakes,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _trained(
    predictors: tuple[str, ...], file: Path | None, trace: Trace, info: TraceInfo
) -> dict[str, Predictor]:
    """The trained predictor, where one is asked for; it must have been trained for the trace's model."""
    from hetero_runtime.errors import ConfigError

    asked = [name for name in predictors if name in _TRAINED]
    if bool(asked) != (file is not None):
        raise ConfigError(
            "--predictor mamba2 and --predictor-file go together; `hetero-runtime train-predictor` makes "
            "such a file"
        )
    if file is None:
        return {}
    from hetero_runtime.prediction import RouterFingerprint, read_predictor
    from hetero_runtime.prediction.horizons import predictors_of
    from hetero_scheduler.simulator.foreseen import Foreseen

    stored = read_predictor(file, RouterFingerprint.of_trace(trace, info))
    trained: dict[str, Predictor] = {}
    for name in asked:
        try:
            (predictor,) = predictors_of(stored, 1, nearest=_TRAINED[name])
            trained[name] = Foreseen(predictor, trace)
        except ValueError as error:
            raise ConfigError(f"--predictor {name} with {file}: {error}") from error
    return trained
