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


COVERED: dict[str, Architecture] = {
    "DeepseekV2ForCausalLM": Architecture("DeepseekV2ForCausalLM"),
    "DeepseekV3ForCausalLM": Architecture("DeepseekV3ForCausalLM"),
    "DeepseekV4ForCausalLM": Architecture("DeepseekV4ForCausalLM"),
    "Glm4MoeForCausalLM": Architecture("Glm4MoeForCausalLM"),
    "GptOssForCausalLM": Architecture("GptOssForCausalLM"),
    "MiniMaxM2ForCausalLM": Architecture("MiniMaxM2ForCausalLM"),
    "MixtralForCausalLM": Architecture("MixtralForCausalLM"),
    "OlmoeForCausalLM": Architecture("OlmoeForCausalLM"),
    "Qwen2MoeForCausalLM": Architecture("Qwen2MoeForCausalLM"),
    "Qwen3MoeForCausalLM": Architecture("Qwen3MoeForCausalLM"),
    "Qwen3NextForCausalLM": Architecture("Qwen3NextForCausalLM"),
    "Qwen3VLMoeForConditionalGeneration": Architecture("Qwen3VLMoeForConditionalGeneration", has_images=True),
    "Qwen3_5MoeForCausalLM": Architecture("Qwen3_5MoeForCausalLM"),
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
