"""One request, its way to be withdrawn, and what comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from hetero_runtime.errors import RequestError
from hetero_runtime.generation.base import FinishReason
from hetero_runtime.generation.params import SamplingParams


class CancelToken:
    """Withdraws a request from any thread; the engine looks at it between layers and tokens."""

    def __init__(self) -> None:
        self._event = threading.Event()

    @property
    def is_cancelled(self) -> bool:
        """Whether `cancel` was called; it never goes back to False."""
        return self._event.is_set()

    def cancel(self) -> None:
        """Ask for the end; returns at once, may be called again."""
        self._event.set()


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt that passed `check_prompt`, and how to answer it."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    cancel: CancelToken = field(default_factory=CancelToken)
    deadline_s: float | None = None
    """Moment on the clock of `time.monotonic()` after which no further step begins; None waits for ever."""

    def interruption(self) -> FinishReason | None:
        """Why no further step may begin: cancelled, past its deadline, or None to go on."""
        if self.cancel.is_cancelled:
            return "cancelled"
        if self.deadline_s is not None and time.monotonic() >= self.deadline_s:
            return "deadline"
        return None


@dataclass(frozen=True)
class Delta:
    """One step of a stream. Text may be empty while a character or a stop string is undecided."""

    text: str
    token_id: int | None
    """The sampled token; None in the last delta of a request that was cancelled or ran out of time."""
    finish_reason: FinishReason | None = None
    """Set in the last delta only."""


@dataclass(frozen=True)
class Timings:
    """How long a request took, in seconds from its start."""

    ttft_s: float
    """Until the first token: prefill, and any wait in front of it."""
    decode_s: float
    """From the first token to the last."""
    tok_s: float
    """Tokens a second after the first one; 0 when there was no second."""

    @classmethod
    def between(
        cls, started_s: float, first_token_s: float, finished_s: float, *, num_tokens: int
    ) -> Timings:
        """From three moments of one monotonic clock and the number of generated tokens."""
        decode_s = finished_s - first_token_s
        tok_s = (num_tokens - 1) / decode_s if num_tokens > 1 and decode_s > 0 else 0.0
        return cls(ttft_s=first_token_s - started_s, decode_s=decode_s, tok_s=tok_s)


@dataclass(frozen=True)
class Completion:
    """The answer to one request."""

    text: str
    """Without the stop string and without special tokens."""
    token_ids: tuple[int, ...]
    """All generated tokens, an end-of-sequence token and those of a stop string included."""
    finish_reason: FinishReason
    prompt_tokens: int
    timings: Timings


def check_prompt(
    prompt_ids: Sequence[int],
    max_length: int,
    params: SamplingParams,
    *,
    vocab_size: int | None = None,
    num_image_tokens: int = 0,
) -> None:
    """Refuse a prompt that cannot be served: empty, outside the vocabulary, or over the context.

    `max_length` is the room of a row in tokens, for prompt and answer together; `num_image_tokens`: how many
    of the prompt's tokens stand for images. Raises RequestError with the numbers and the ways out.
    """
    if len(prompt_ids) == 0:
        raise RequestError("the prompt is empty: it has no tokens; give it at least one")
    if vocab_size is not None:
        wrong = next((i for i, token in enumerate(prompt_ids) if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise RequestError(
                f"prompt token {wrong} is {prompt_ids[wrong]}; the model knows ids 0 to {vocab_size - 1}: "
                "use the model's own tokenizer"
            )
    needed = len(prompt_ids) + params.max_tokens
    if needed <= max_length:
        return
    room = max_length - len(prompt_ids)
    ways = [f"shorten the prompt by {needed - max_length} tokens"] if params.max_tokens < max_length else []
    ways += ["give smaller or fewer images"] if num_image_tokens else []
    ways += [f"set max_tokens to {room} or less"] if room > 0 else []
    ways += [f"set execution.max_length to {needed} or more"]
    of_images = f" ({num_image_tokens} of them for images)" if num_image_tokens else ""
    raise RequestError(
        f"the prompt has {len(prompt_ids)} tokens{of_images} and max_tokens is {params.max_tokens}: {needed} "
        f"together, over execution.max_length {max_length}; {', or '.join(ways)}"
    )
