"""`hetero-runtime chat`: a conversation in the terminal, or over a pipe, one line a turn."""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from hetero_runtime.cli import sampling
from hetero_runtime.cli.errors import exit_on_error
from hetero_runtime.cli.notices import notices_afterwards
from hetero_runtime.cli.options import (
    ConfigOption,
    JsonOption,
    ModelArgument,
    ProfileOption,
    SetOption,
    recording_to,
)
from hetero_runtime.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hetero_runtime.engine import Engine
    from hetero_runtime.generation import Message, SamplingParams
    from hetero_runtime.row import Row


@exit_on_error
def chat_command(
    model: ModelArgument = None,
    system: Annotated[str | None, typer.Option(help="System message, where the template has one.")] = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
    max_tokens: sampling.MaxTokens = 256,
    temperature: sampling.Temperature = 0.7,
    top_p: sampling.TopP = 0.95,
    top_k: sampling.TopK = 0,
    min_p: sampling.MinP = 0.0,
    repetition_penalty: sampling.Penalty = 1.0,
    seed: sampling.Seed = None,
    stop: sampling.Stop = None,
    profile: ProfileOption = None,
) -> None:
    """Talk to MODEL, or to the bundled one. An empty line or the end of input leaves; /new starts again."""
    from rich.console import Console

    from hetero_runtime.cli.loading import open_engine, plan_to_load
    from hetero_runtime.cli.options import demo_config_of

    params = sampling.sampling_params(
        stop,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    opening: list[Message] = [{"role": "system", "content": system}] if system else []
    asked = partial(demo_config_of, model, config, overrides)
    planned = plan_to_load(asked())
    sampling.check_room(params, planned.config)
    recording = recording_to(profile)
    with open_engine(planned, asked, Console(stderr=True)) as engine, recording:
        messages = list(opening)
        for line in _lines():
            if line == "/new":
                messages = list(opening)
                continue
            messages.append({"role": "user", "content": line})
            row = _open(engine, messages, params, num_kept=len(opening))
            messages.append({"role": "assistant", "content": _answer(row)})
        if as_json:
            typer.echo(json.dumps({"messages": messages, "stats": engine.stats().to_json()}))


def _open(engine: Engine, messages: list[Message], params: SamplingParams, *, num_kept: int) -> Row:
    """The row for the next answer. What no longer fits in the context is dropped, oldest turn first."""
    while True:
        try:
            return engine.open(messages, params)
        except RequestError:
            if len(messages) <= num_kept + 1:  # the last question alone does not fit either
                raise
            del messages[num_kept : num_kept + 2]
            typer.secho("(the oldest turn no longer fits in the context)", dim=True, err=True)


def _answer(row: Row) -> str:
    """Stream the answer; Ctrl-C ends it and keeps what there is."""
    deltas = row.deltas()
    with notices_afterwards():
        try:
            for delta in deltas:
                typer.echo(delta.text, nl=False)
        except KeyboardInterrupt:
            row.cancel()
            for delta in deltas:
                typer.echo(delta.text, nl=False)
        typer.echo("")
    return row.completion().text


def _lines() -> Iterator[str]:
    is_terminal = sys.stdin.isatty()
    while True:
        if is_terminal:
            typer.secho("> ", nl=False, bold=True)
        line = sys.stdin.readline().strip()
        if not line:
            return
        yield line
