"""From token ids to the deltas of a stream: detokenisation and stopping, put together."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hetero_runtime.generation.base import FinishReason, Tokenizer
from hetero_runtime.generation.detokenize import IncrementalDetokenizer
from hetero_runtime.generation.params import SamplingParams
from hetero_runtime.generation.request import Delta
from hetero_runtime.generation.stopping import StopChecker


class TextStream:
    """The text of one request while it grows; after a delta with a finish reason it is closed.

    The engine calls `push` for each sampled token until a delta carries a finish reason, or
    `finish` when it gives up before (cancelled, deadline). `text` and `token_ids` are the result.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        *,
        eos_token_ids: Collection[int],
        prompt_ids: Sequence[int] = (),
    ) -> None:
        """`prompt_ids`: see IncrementalDetokenizer; leave it out for chat, where the answer starts a text."""
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids=prompt_ids)
        special = special_stop_ids(tokenizer, params.stop)
        self._stop = StopChecker(params, eos_token_ids, stop_token_ids=special)
        self._pieces: list[str] = []
        self._finish_reason: FinishReason | None = None
        self.token_ids: list[int] = []

    @property
    def text(self) -> str:
        """All text so far that is certain: the sum of the deltas."""
        return "".join(self._pieces)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the text ended; None while it grows."""
        return self._finish_reason

    def push(self, token_id: int) -> Delta:
        """Add one sampled token; the text that it makes certain, and the reason if it is the last."""
        assert self._finish_reason is None, f"token {token_id} after the end ({self._finish_reason})"
        self.token_ids.append(token_id)
        reason = self._stop.check_token(token_id)
        text = "" if self._stop.is_last_token(token_id) else self._detokenizer.push(token_id)
        return self._close(text, reason, token_id) if reason else self._go_on(text, token_id)

    def finish(self, reason: FinishReason) -> Delta:
        """End without a further token; the text that was held back is part of the result."""
        assert self._finish_reason is None, f"finished twice: {self._finish_reason}, then {reason}"
        return self._close("", reason, None)

    def _go_on(self, text: str, token_id: int) -> Delta:
        emission = self._stop.feed(text)
        return self._delta(emission.text, token_id, "stop" if emission.is_stopped else None)

    def _close(self, text: str, reason: FinishReason, token_id: int | None) -> Delta:
        emission = self._stop.feed(text + self._detokenizer.flush())
        if emission.is_stopped:
            reason = "stop"
        return self._delta(emission.text + self._stop.release(), token_id, reason)

    def _delta(self, text: str, token_id: int | None, reason: FinishReason | None) -> Delta:
        self._finish_reason = reason
        self._pieces.append(text)
        return Delta(text=text, token_id=token_id, finish_reason=reason)


def special_stop_ids(tokenizer: Tokenizer, stop: Sequence[str]) -> frozenset[int]:
    """Ids of the stop strings that name a special token, such as `<|im_end|>`.

    Special tokens give no text, so such a stop string would never be seen in it.
    """
    ids = ((text, tokenizer.convert_tokens_to_ids(text)) for text in stop)
    return frozenset(
        token_id
        for text, token_id in ids
        if token_id is not None
        and tokenizer.decode([token_id], skip_special_tokens=False) == text
        and not tokenizer.decode([token_id], skip_special_tokens=True)
    )
