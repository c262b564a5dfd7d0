"""Which model classes of transformers are covered: those with an exactness test of their own."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

from hetero_runtime.errors import CheckpointError


class Architecture(NamedTuple):
    """How one `architectures` entry of config.json is run.

    `model_class`: the class to build, of `module`. `is_text_part`: the checkpoint has more (a vision tower),
    only its language model is used. `has_images`: images are accepted. `is_steerable`: in every layer its
    router takes one top-k of its scores, so that it can be told what to choose (`router_choice`).
    """

    model_class: str
    is_text_part: bool = False
    has_images: bool = False
    is_steerable: bool = True
    module: str = "transformers"

    def load_class(self) -> Any:
        """The class itself."""
        return getattr(import_module(self.module), self.model_class)


_TEXT_MODELS = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
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
    # some of its routers look at token ids
    "DeepseekV4ForCausalLM": Architecture("DeepseekV4ForCausalLM", is_steerable=False),
    "DeepseekVLV2ForCausalLM": Architecture(
        "DeepseekVL2ForConditionalGeneration",
        has_images=True,
        module="hetero_runtime.hf.deepseek_vl2.model",
    ),
    "Qwen3VLMoeForConditionalGeneration": Architecture("Qwen3VLMoeForConditionalGeneration", has_images=True),
    "Qwen3_5MoeForConditionalGeneration": Architecture("Qwen3_5MoeForCausalLM", is_text_part=True),
}


_BY_MODEL_TYPE = {"deepseek_vl_v2": "DeepseekVLV2ForCausalLM"}
"""For checkpoints that were published without `architectures`."""


def architecture_of(config: dict[str, Any]) -> Architecture:
    """The covered architecture that a config.json names. Raises CheckpointError listing what is covered."""
    by_type = _BY_MODEL_TYPE.get(str(config.get("model_type")))
    names = config.get("architectures") or ([by_type] if by_type else [])
    for name in names:
        if name in COVERED:
            return COVERED[name]
    named = ", ".join(names) if names else "none (config.json has no `architectures`)"
    raise CheckpointError(
        f"architecture {named} is not covered by this version. Covered: {', '.join(sorted(COVERED))}"
    )
