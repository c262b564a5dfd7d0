"""transformers' DeepSeek text model with multi-head attention, with a head."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import DeepseekV2ForCausalLM
from transformers.models.deepseek_ocr2.modeling_deepseek_ocr2 import (
    DeepseekOcr2TextModel,
    DeepseekOcr2TextPreTrainedModel,
)


class MultiHeadForCausalLM(DeepseekOcr2TextPreTrainedModel):
    """`DeepseekOcr2TextModel` below the forward of `DeepseekV2ForCausalLM`, which asks no more of it."""

    forward = DeepseekV2ForCausalLM.forward

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = DeepseekOcr2TextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]
