"""What every part of generation speaks: why a text ended, and what a tokenizer must offer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

FinishReason: TypeAlias = Literal["stop", "length", "cancelled", "deadline"]
"""`stop`: an end-of-sequence token or a stop string; `length`: `max_tokens` reached (OpenAI's names).
`cancelled` and `deadline`: the caller withdrew the request, or its time was over."""

Message: TypeAlias = Mapping[str, Any]
"""One chat message in OpenAI form: `role`, and `content` as text or as a list of parts."""

LogitsTransform: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"
"""`(token ids [1, tokens] int64, logits [1, vocab] float32) -> logits [1, vocab]`; inputs stay untouched."""


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that generation uses.

    Its own signatures are unions over batches, so what comes back for one text is said in words here.
    """

    chat_template: Any

    def decode(self, token_ids: Any, skip_special_tokens: bool = ..., **kwargs: Any) -> Any:
        """The text (str) of a list of ids; bytes that are no whole character come out as U+FFFD."""

    def convert_tokens_to_ids(self, tokens: str) -> Any:
        """The id (int) of one token given by its name; None or the id of "unknown" where there is none."""

    def get_chat_template(self) -> str:
        """The Jinja source of the default chat template; ValueError when there is none."""

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        """The prompt (list of ids) of a conversation, control tokens included."""
