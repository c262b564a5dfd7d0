"""The language part of a DeepSeek-VL2 checkpoint, by what its configuration says:

    use_mla false                 multi-head attention      the text part of DeepSeek-OCR-2    (VL2-tiny)
    latent attention, softmax     greedy or group-limited   DeepSeek-V2                        (VL2-small)
    latent attention, sigmoid     noaux_tc                  DeepSeek-V3                        (VL2)

All three are transformers' own; tensor names are the same. Of the first, transformers has no class with a
head for text alone, so that is put together here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transformers import DeepseekOcr2TextConfig, DeepseekV2Config, DeepseekV3Config, PreTrainedConfig

from hetero_runtime.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DEFAULTS: dict[str, Any] = {
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
    "n_group": None,
    "norm_topk_prob": False,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": None,
    "topk_method": "greedy",
    "use_mla": True,
}
"""What a key means where the published configuration leaves it out; transformers' defaults differ."""
_NAMES_ONLY = ("model_type", "architectures", "auto_map", "use_mla", "scoring_func", "moe_layer_freq")
"""Keys that choose a class and are no field of it."""
_ROUTERS = {"greedy": "softmax", "group_limited_greedy": "softmax", "noaux_tc": "sigmoid"}
"""Ways to choose experts, with the scores that each is for."""


def language_config_of(published: Mapping[str, Any]) -> PreTrainedConfig:
    """transformers' configuration for `language_config` of config.json.

    Raises CheckpointError for a combination that no class of transformers computes.
    """
    values = _DEFAULTS | dict(published)
    _check(values)
    fields = {name: value for name, value in values.items() if name not in _NAMES_ONLY}
    if not values["use_mla"]:
        num_dense = values["first_k_dense_replace"]
        num_layers = values.get("num_hidden_layers", DeepseekOcr2TextConfig.num_hidden_layers)
        kinds = ["dense" if layer < num_dense else "sparse" for layer in range(num_layers)]
        fields = {name: value for name, value in fields.items() if not _is_latent(name)}
        return DeepseekOcr2TextConfig(**fields, mlp_layer_types=kinds)
    if values["topk_method"] == "noaux_tc":
        del fields["topk_method"]
        return DeepseekV3Config(**fields)
    return DeepseekV2Config(**fields)


def _is_latent(name: str) -> bool:
    """Whether a key is about latent attention, or about what `mlp_layer_types` says."""
    return name.startswith(("kv_lora", "q_lora", "qk_", "v_head")) or name == "first_k_dense_replace"


def _check(values: Mapping[str, Any]) -> None:
    method, scores = values["topk_method"], values["scoring_func"]
    if _ROUTERS.get(method) != scores:
        covered = ", ".join(f"{name} with {each}" for name, each in _ROUTERS.items())
        raise CheckpointError(
            f"topk_method {method!r} with scoring_func {scores!r} is not covered. Covered: {covered}"
        )
    if method == "noaux_tc" and not values["use_mla"]:
        raise CheckpointError("topk_method 'noaux_tc' is covered with latent attention only (use_mla)")
    if method != "noaux_tc" and values["norm_topk_prob"]:
        raise CheckpointError(
            f"norm_topk_prob with topk_method {method!r} is not covered: transformers' DeepSeek-V2 leaves "
            "the weights of experts as they are"
        )
    if values["moe_layer_freq"] != 1:
        raise CheckpointError(f"moe_layer_freq {values['moe_layer_freq']} is not covered, only 1")


def build_language_model(config: PreTrainedConfig) -> PreTrainedModel:
    """The model with its head, as `config` says; named as the tensors are (`model.layers...`, `lm_head`)."""
    from transformers import DeepseekV2ForCausalLM, DeepseekV3ForCausalLM

    from hetero_runtime.hf.deepseek_vl2.multi_head import MultiHeadForCausalLM

    classes: dict[str, Any] = {
        DeepseekOcr2TextConfig.model_type: MultiHeadForCausalLM,
        DeepseekV2Config.model_type: DeepseekV2ForCausalLM,
        DeepseekV3Config.model_type: DeepseekV3ForCausalLM,
    }
    model: PreTrainedModel = classes[config.model_type]._from_config(config)
    return model
