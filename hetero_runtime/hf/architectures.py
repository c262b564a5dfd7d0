"""Which model classes of transformers are covered: those with an exactness test of their own."""

from __future__ import annotations

from typing import Any, NamedTuple

from hetero_runtime.errors import CheckpointError


class Architecture(NamedTuple):
    """How one `architectures` entry of config.json is run.

    `model_class`: the transformers class to build. `is_text_part`: the checkpoint has more (a vision tower),
    only its language model is used. `has_images`: images are accepted.
    """

    model_class: str
    is_text_part: bool = False
    has_images: bool = False


_TEXT_MODELS = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV4ForCausalLM",
    "Glm4MoeForCausalLM",
    "GptOssForCausalLM",
    "MiniMaxM2ForCausalLM",
    "MixtralForCausalLM",
    "OlmoeForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5MoeForCausalLM",
)

COVERED: dict[str, Architecture] = {
    **{name: Architecture(name) for name in _TEXT_MODELS},
    "Qwen3VLMoeForConditionalGeneration": Architecture("Qwen3VLMoeForConditionalGeneration", has_images=True),
    "Qwen3_5MoeForConditionalGeneration": Architecture("Qwen3_5MoeForCausalLM", is_text_part=True),
}


def architecture_of(config: dict[str, Any]) -> Architecture:
    """The covered architecture that a config.json names. Raises CheckpointError listing what is covered."""
    names = config.get("architectures") or []
    for name in names:
        if name in COVERED:
            return COVERED[name]
    named = ", ".join(names) if names else "none (config.json has no `architectures`)"
    raise CheckpointError(
        f"architecture {named} is not covered by this version. Covered: {', '.join(sorted(COVERED))}"
    )
