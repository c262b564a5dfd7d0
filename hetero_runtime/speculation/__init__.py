"""Speculation: a drafter proposes tokens, the model checks all of them in one pass.

prompt_lookup     the text itself: what followed the same few tokens before
autoregressive    a small model with the same tokenizer
block             a network that reads the model's own hidden states, a whole block at once

    text  a b c          drafted  d e f          the model reads  c d e f  at once
                         it says  d e X          committed        d e X    and forgets f

What comes out is the model's own choice at every position (`acceptance.py`); a draft decides only how many
tokens one pass gives. Where asked for, the tokens of a draft share a set of experts (`block_routing.py`):
fewer copies, and a model that includes the drafter.
"""

from __future__ import annotations

from hetero_runtime.speculation.base import Draft, Drafter, DraftRow
from hetero_runtime.speculation.build import Speculation, checked_sequences, make_speculation
from hetero_runtime.speculation.checked import CheckedSequences, CheckedText

__all__ = [
    "CheckedSequences",
    "CheckedText",
    "Draft",
    "DraftRow",
    "Drafter",
    "Speculation",
    "checked_sequences",
    "make_speculation",
]
