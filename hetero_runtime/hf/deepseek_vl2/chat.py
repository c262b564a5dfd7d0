"""The tokenizer of a DeepSeek-VL2 checkpoint, made ready for images and conversations.

The published processor adds tokens in code and writes conversations in code; here both are put on the
tokenizer, so that nobody else has to know:

    <begin><|User|>: <image>
    What is this?

    <|Assistant|>:                       the answer follows, then <end>, then the next <|User|>
"""

from __future__ import annotations

from typing import Any

IMAGE_TOKEN = "<image>"

_ADDED = (
    IMAGE_TOKEN,
    "<|ref|>",
    "<|/ref|>",
    "<|det|>",
    "<|/det|>",
    "<|grounding|>",
    "<|User|>",
    "<|Assistant|>",
)
"""In the order in which the published processor adds those that a tokenizer lacks: it decides their ids."""

_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- set text %}
        {%- if message.content is string %}{{- message.content }}
        {%- else %}
            {%- for part in message.content %}
                {{- part.text if part.type == 'text' else '<image>\\n' }}
            {%- endfor %}
        {%- endif %}
    {%- endset %}
    {%- if message.role == 'user' %}
        {{- '<|User|>: ' ~ text | trim ~ '\\n\\n<|Assistant|>:' }}
    {%- elif message.role == 'assistant' %}
        {{- text | trim ~ eos_token }}
    {%- elif message.role == 'system' and loop.first %}
        {{- text | trim }}
    {%- else %}
        {{- raise_exception(message.role ~ ' message out of place: system first, then user and assistant') }}
    {%- endif %}
{%- endfor %}"""


def prepare_tokenizer(tokenizer: Any) -> None:
    """Give `tokenizer` the tokens that it lacks, and how conversations with images are written."""
    tokenizer.add_tokens(list(_ADDED), special_tokens=True)
    if IMAGE_TOKEN not in (tokenizer.chat_template or ""):
        tokenizer.chat_template = _TEMPLATE
