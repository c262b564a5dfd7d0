"""`hetero-runtime run`: a plan, the text as it comes, then what it cost."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hetero_runtime.cli import sampling
from hetero_runtime.cli.errors import exit_on_error
from hetero_runtime.cli.options import (
    ConfigOption,
    JsonOption,
    ModelArgument,
    ProfileOption,
    SetOption,
    recording_to,
)

if TYPE_CHECKING:
    from hetero_runtime.generation import Message

PROMPT = "Once upon a time"


@exit_on_error
def run_command(
    model: ModelArgument = None,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="Text to go on from.")] = PROMPT,
    as_chat: Annotated[bool, typer.Option("--chat", help="The prompt is a user's message.")] = False,
    images: Annotated[
        list[Path] | None, typer.Option("--image", help="Image file before the prompt (implies --chat).")
    ] = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
    max_tokens: sampling.MaxTokens = 200,
    temperature: sampling.Temperature = 0.8,
    top_p: sampling.TopP = 0.95,
    top_k: sampling.TopK = 0,
    min_p: sampling.MinP = 0.0,
    repetition_penalty: sampling.Penalty = 1.0,
    seed: sampling.Seed = None,
    stop: sampling.Stop = None,
    profile: ProfileOption = None,
) -> None:
    """Generate text from MODEL, or from the bundled model with a quarter of its experts resident, by its
    predictor's forecasts where nothing else is set."""
    from rich.console import Console

    from hetero_runtime.cli.loading import open_engine, plan_to_load
    from hetero_runtime.cli.notices import notices_afterwards
    from hetero_runtime.cli.options import demo_config_of
    from hetero_runtime.cli.summary import summary_table
    from hetero_runtime.plan import render_plan

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
    console = Console(stderr=as_json)
    asked = partial(demo_config_of, model, config, overrides)
    planned = plan_to_load(asked())
    sampling.check_room(params, planned.config)
    console.print(render_plan(planned.memory), "")
    question = _messages(prompt, images or []) if as_chat or images else prompt
    recording = recording_to(profile)
    with open_engine(planned, asked, console) as engine, recording:
        if isinstance(question, str):
            typer.echo(question, nl=False)
        with notices_afterwards():
            row = engine.open(question, params)
            for delta in row.deltas():
                typer.echo(delta.text, nl=False)
            typer.echo("")
        completion, stats, lru = row.completion(), engine.stats(), engine.lru_hit_rate()
        errors = engine.weight_errors()
    table = summary_table(stats, completion.timings, lru_hit_rate=lru, weight_errors=errors)
    console.print("", table, sep="\n")
    if as_json:
        typer.echo(json.dumps(_report(completion, stats, lru) | {"weight_errors": errors}))


def _messages(prompt: str, images: list[Path]) -> list[Message]:
    """What the user says. Raises RequestError, before anything is loaded, for what is no image."""
    from hetero_runtime.generation import collect_images

    parts: list[dict[str, Any]] = [{"type": "image", "image": str(path)} for path in images]
    messages: list[Message] = [{"role": "user", "content": [*parts, {"type": "text", "text": prompt}]}]
    collect_images(messages)
    return messages


def _report(completion: Any, stats: Any, lru_hit_rate: float | None) -> dict[str, Any]:
    return {
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": len(completion.token_ids),
        "ttft_s": completion.timings.ttft_s,
        "tok_s": completion.timings.tok_s,
        "hit_rate": stats.decode.cache.hit_rate,
        "lru_hit_rate": lru_hit_rate,
        "bytes_moved": stats.prefill.cache.bytes_moved + stats.decode.cache.bytes_moved,
        "stats": stats.to_json(),
    }
