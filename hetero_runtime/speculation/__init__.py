"""Speculation: a drafter proposes tokens, the model checks all of them in one pass.

prompt_lookup     the text itself: what followed the same few tokens before
autoregressive    a small model with the same tokenizer

    text  a b c          drafted  d e f          the model reads  c d e f  at once
                         it says  d e X          committed        d e X    and forgets f

What comes out is the model's own choice at every position (`acceptance.py`); a draft decides only how many
tokens one pass gives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from hetero_runtime.speculation.base import Draft, Drafter, DraftRow

if TYPE_CHECKING:
    from hetero_runtime.config import ResolvedConfig

__all__ = ["Draft", "DraftRow", "Drafter", "Speculation", "make_speculation"]


class Speculation(NamedTuple):
    """`k`: the most tokens of a draft."""

    drafter: Drafter
    k: int


def make_speculation(config: ResolvedConfig, tokenizer: Any, model: Any) -> Speculation | None:
    """What `config.speculation` asks for, for `model`, which may still be without weights; None where nothing
    is drafted. Raises CheckpointError for a drafter that cannot be loaded or has other words, and for a model
    that cannot check drafts."""
    asked = config.speculation
    if asked.drafter == "none":
        return None
    if asked.drafter == "prompt_lookup":
        from hetero_runtime.speculation.prompt_lookup import PromptLookup

        return Speculation(PromptLookup(), asked.k)
    import torch

    from hetero_runtime.hf.drafter import load_drafter
    from hetero_runtime.speculation.autoregressive import AutoregressiveDrafter

    assert asked.model is not None, "speculation.model is checked with the configuration"
    device = torch.device(config.device)
    drafter = load_drafter(asked.model, tokenizer, dtype=config.model.dtype, device=device)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    return Speculation(AutoregressiveDrafter(drafter, vocab_size=vocab_size, device=device), asked.k)
