"""Token ids to text, one token at a time.

Decoding each token alone is wrong twice: a character may be spread over several tokens, and many
tokenizers drop the space in front of the first token they decode. So each new token is decoded
together with the tokens in front of it, and what it adds is the difference of the two texts:

    tokens     ... a b c | d e          context = tokens whose text is out (a b c)
                   ^^^^^   ^^^          pending = tokens whose text is not  (d e)
    new text = decode(context + pending) minus decode(context)

Nothing goes out while the new text ends in U+FFFD, the mark of a character that is not whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetero_runtime.generation.base import Tokenizer

NUM_CONTEXT_TOKENS = 5
"""Tokens of the prompt that the first new token is decoded with: enough for any leading-space rule."""

REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """Turns the tokens of one request into pieces of text whose sum is the text of them all.

    With `prompt_ids` the text is what follows the prompt, leading space included; without, it is
    `tokenizer.decode(generated)`. Special tokens give no text.
    """

    def __init__(self, tokenizer: Tokenizer, *, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._context = list(prompt_ids[-NUM_CONTEXT_TOKENS:])
        self._pending: list[int] = []
        self._context_text = self._decode(self._context)

    def push(self, token_id: int) -> str:
        """Add one token; the text that is certain now, perhaps empty."""
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        if len(text) <= len(self._context_text) or text.endswith(REPLACEMENT):
            return ""
        return self._emit(text)

    def flush(self) -> str:
        """The rest, at the end: a character that was never completed comes out as U+FFFD."""
        return self._emit(self._decode(self._context + self._pending)) if self._pending else ""

    def _emit(self, text: str) -> str:
        """Hand out what `text` has beyond the context, and make the pending tokens the context."""
        new = text[len(self._context_text) :]
        self._context, self._pending = self._pending, []
        self._context_text = self._decode(self._context)
        return new

    def _decode(self, token_ids: list[int]) -> str:
        # Clean-up would remove spaces in front of punctuation, so pieces would not add up.
        return str(
            self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )
