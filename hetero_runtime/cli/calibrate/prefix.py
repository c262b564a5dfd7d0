"""`hetero-runtime calibrate prefix MODEL --text FILE`: how many first MoE layers are best pinned here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetero_runtime.cli.errors import exit_on_error
from hetero_runtime.cli.options import ConfigOption, JsonOption, ModelArgument, SetOption

if TYPE_CHECKING:
    from rich.table import Table

    from hetero_runtime.config import Config
    from hetero_runtime.lookahead.lessons import Source
    from hetero_runtime.lookahead.profile import PrefixProfile


@exit_on_error
def calibrate_prefix_command(
    text: Annotated[Path, typer.Option("--text", help="Prompts: a text file or a .jsonl, images too.")],
    model: ModelArgument = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    prefixes: Annotated[
        str, typer.Option("--prefixes", help="Such as 0,2,4. Empty: those that fit, evenly.")
    ] = "",
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of the file that are served.")] = 4,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=2, help="Of each answer.")] = 32,
    plot: Annotated[Path | None, typer.Option("--plot", help="PNG of the curve.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure what pinned prefixes cost on this machine, in the room that the configuration gives; kept
    beside the model, where `memory.pinned_prefix: auto` of preset vismmoe finds it."""
    from dataclasses import asdict

    from rich.console import Console

    from hetero_runtime.cli.listed import whole_numbers
    from hetero_runtime.cli.options import config_of
    from hetero_runtime.lookahead.lessons import read_lessons

    chosen = config_of(model, config, ["preset=vismmoe", *(overrides or [])])
    chosen_prefixes = whole_numbers(prefixes, "--prefixes")
    sources = read_lessons(text)[:prompts]
    profile = _profile(chosen, sources, max_tokens=max_tokens, prefixes=chosen_prefixes)
    path = _keep(chosen, profile)
    console = Console(stderr=as_json)
    console.print(_table(profile))
    console.print(f"written to {path}", highlight=False)
    if plot is not None:
        from hetero_runtime.lookahead.plot import draw_prefixes

        draw_prefixes(profile, plot)
    if as_json:
        typer.echo(json.dumps(asdict(profile) | {"best": profile.best.pinned, "written_to": str(path)}))


def _profile(
    config: Config, sources: Sequence[Source], *, max_tokens: int, prefixes: tuple[int, ...]
) -> PrefixProfile:
    from hetero_runtime.cli.progress import count_progress
    from hetero_runtime.hf.console import keep_quiet
    from hetero_runtime.lookahead.lessons import prompt_of
    from hetero_runtime.lookahead.prefix import ProfileOptions, profile_prefixes

    keep_quiet()
    options, prompts = ProfileOptions(max_tokens, prefixes), [prompt_of(source) for source in sources]
    with count_progress("prefixes") as done:
        return profile_prefixes(config, prompts, options=options, done=done)


def _keep(config: Config, profile: PrefixProfile) -> Path:
    from hetero_runtime.beside_model import beside
    from hetero_runtime.config import model_dir
    from hetero_runtime.lookahead.profile import PREFIX_SUFFIX, read_profiles, with_profile, write_profiles
    from hetero_runtime.plan import read_geometry
    from hetero_runtime.prediction import RouterFingerprint

    fingerprint = RouterFingerprint.of_model(read_geometry(model_dir(config)))
    path = beside(model_dir(config), PREFIX_SUFFIX)
    write_profiles(path, with_profile(read_profiles(path, fingerprint), profile), fingerprint=fingerprint)
    return path


def _table(profile: PrefixProfile) -> Table:
    from rich.table import Table

    title = f"room for {profile.num_experts} experts on {profile.device}"
    table = Table("pinned", "slabs", "seconds", "prefill", "decode", "hit rate", title=title)
    for point in profile.points:
        table.add_row(
            f"{point.pinned} (fastest)" if point == profile.best else str(point.pinned),
            f"{point.slabs:,}",
            *(f"{seconds:.2f}" for seconds in (point.seconds, point.prefill_s, point.decode_s)),
            f"{point.hit_rate:.1%}",
        )
    return table
