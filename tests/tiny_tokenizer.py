"""A byte-level tokenizer of 264 tokens: any text encodes, and every id a tiny model can pick decodes."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PAD, BEGIN, END, USER, VISION_START, VISION_END, IMAGE, VIDEO = range(8)
SPECIAL_TOKENS = (
    "<|pad|>",
    "<|begin|>",
    "<|end|>",
    "<|user|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
VOCAB_SIZE = len(SPECIAL_TOKENS) + 256

# A message is text, or a list of parts in OpenAI form; an image becomes one placeholder.
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{ '<|user|>' if message.role == 'user' else '' }}"
    "{%- if message.content is string %}{{ message.content }}"
    "{%- else %}{% for part in message.content %}"
    "{{ part.text if part.type == 'text' else '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- endfor %}{% endif %}"
    "{{ '<|end|>' }}"
    "{%- endfor %}"
    "{{ '<|begin|>' if add_generation_prompt else '' }}"
)


def save_tokenizer(folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into `folder`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL_TOKENS[PAD],
        "bos_token": SPECIAL_TOKENS[BEGIN],
        "eos_token": SPECIAL_TOKENS[END],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 256,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
