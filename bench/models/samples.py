"""What the model writes: a fixed set of prompts, continued by sampling, shown as they come."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM


@dataclass(frozen=True)
class Prompt:
    """One prompt, and whether it goes through the chat template."""

    kind: str
    text: str
    is_chat: bool = False


PROMPTS = (
    Prompt("story", "Once upon a time there was a brave girl named Ruth."),
    Prompt("story", "Title: Theo and the Lantern"),
    Prompt("dialog", "User: Hello.\nAssistant:"),
    Prompt(
        "math",
        "Question: There are 6 boxes. Each box holds 12 pens. How many pens are there in all?\nAnswer:",
    ),
    Prompt("math", "71 + 78 ="),
    Prompt("encyc", "harbour (noun):"),
    Prompt("code", "def largest(values):"),
    Prompt("code", "func (b *Buffer) Write("),
    Prompt("docs", "The following example shows how to open a file"),
    Prompt("prose", "It was a fine morning, and Elizabeth"),
    Prompt("chat", "Hello, who are you?", is_chat=True),
    Prompt("chat", "What is 12 plus 45?", is_chat=True),
    Prompt("chat", "What is 8 x 7?", is_chat=True),
    Prompt("chat", "Sort these words: pear, lamp, apple, boat.", is_chat=True),
    Prompt("chat", "Tell me a story about Nora and the boat.", is_chat=True),
    Prompt("chat", "What is a mixture of experts?", is_chat=True),
    Prompt("chat", "What is the capital of France?", is_chat=True),
    Prompt("chat", "Write a Python function called add.", is_chat=True),
    Prompt("chat", "Solve for x: 3*x + 4 = 19", is_chat=True),
)


def write_samples(
    model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, *, max_tokens: int, seed: int
) -> list[tuple[Prompt, str]]:
    """Every prompt with its continuation, sampled at temperature 0.8 and top-p 0.95, special tokens kept."""
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.text}], tokenize=False, add_generation_prompt=True
        )
        if prompt.is_chat
        else prompt.text
        for prompt in PROMPTS
    ]
    torch.manual_seed(seed)
    batch = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False).to(model.device)
    written = model.generate(
        **batch, max_new_tokens=max_tokens, do_sample=True, temperature=0.8, top_p=0.95, top_k=0
    )
    answers = tokenizer.batch_decode(written[:, batch["input_ids"].shape[1] :], skip_special_tokens=False)
    return [(prompt, answer.replace("<|pad|>", "")) for prompt, answer in zip(PROMPTS, answers, strict=True)]
