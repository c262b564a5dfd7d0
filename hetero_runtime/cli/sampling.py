"""Sampling options of `run` and `chat`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hetero_runtime.config import ResolvedConfig
    from hetero_runtime.generation import SamplingParams

MaxTokens = Annotated[int, typer.Option("--max-tokens", help="Most tokens to generate.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option("--top-p", help="Keep the smallest set this probable; 1: all.")]
TopK = Annotated[int, typer.Option("--top-k", help="Keep this many tokens; 0: all.")]
MinP = Annotated[float, typer.Option("--min-p", help="Drop tokens below this share of the best; 0: none.")]
Penalty = Annotated[float, typer.Option("--repetition-penalty", help="Above 1 discourages repetition.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same text.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="Text that ends the answer. Repeatable.")]


def sampling_params(stop: list[str] | None, **fields: float | int | None) -> SamplingParams:
    """SamplingParams from options of the same names."""
    from hetero_runtime.generation import SamplingParams

    return SamplingParams(stop=tuple(stop or ()), **fields)  # type: ignore[arg-type]


def check_room(params: SamplingParams, config: ResolvedConfig) -> None:
    """Raise RequestError, before anything is loaded, for an answer that no prompt leaves room for."""
    from hetero_runtime.errors import RequestError

    room = config.execution.max_length
    if params.max_tokens >= room:
        raise RequestError(
            f"--max-tokens {params.max_tokens}: prompt and answer share execution.max_length {room}; write "
            f"{room - 1} or less, by as much as the prompt has tokens"
        )
