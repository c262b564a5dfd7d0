"""Build a transformers model without its routed experts and load the rest.

    1  skeleton    every parameter on `meta`: shapes, no memory
    2  backbone    what is no routed expert, through transformers' own loader onto the device
    3  finalize    buffers (rotary frequencies, ...), tied weights

Routed experts stay on `meta` for good: their bytes go from the checkpoint into the host bank, once. The entry
points used here carry underscores in transformers, so they appear in this module alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, modeling_utils
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.quantizers.auto import get_hf_quantizer

from hetero_runtime.checkpoint import Checkpoint, TensorEntry
from hetero_runtime.checkpoint.lazy_tensor import map_tensors
from hetero_runtime.errors import CheckpointError
from hetero_runtime.hf import deepseek_vl2  # noqa: F401 (transformers then reads its configuration)
from hetero_runtime.hf.architectures import Architecture, architecture_of
from hetero_runtime.hf.console import without_bars
from hetero_runtime.hf.conversion import expert_modules
from hetero_runtime.hf.hooks import IMPLEMENTATION
from hetero_runtime.hf.visual import read_sizes_on_host

_WARM_UP = modeling_utils.caching_allocator_warmup

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Skeleton:
    """A model on `meta`.

    `experts`: Experts modules by name, in layer order. `quantizer`: transformers' own, set to dequantize (it
    then concerns only what is no routed expert), or None.
    """

    model: Any
    architecture: Architecture
    experts: dict[str, torch.nn.Module]
    dtype: torch.dtype
    quantizer: Any


def build_skeleton(checkpoint: Checkpoint, *, dtype: str, device: torch.device) -> Skeleton:
    """The model of `checkpoint` on `meta`, its experts to be computed by our hook.

    `dtype`: float32, bfloat16 or float16, of the computation and of what is no routed expert.
    """
    architecture = architecture_of(checkpoint.config)
    config = read_config(checkpoint.path)
    compute_dtype = DTYPES[dtype]
    quantizer, config = _quantizer(config, device)
    if architecture.is_text_part:
        config = config.get_text_config(decoder=True)
    _set_dtype(config, compute_dtype)
    config._experts_implementation = IMPLEMENTATION
    model_class = architecture.load_class()
    with contextlib.ExitStack() as stack:
        for context in model_class.get_init_context(compute_dtype, False, False, None):
            stack.enter_context(context)
        model = model_class(config)
        if quantizer is not None:
            quantizer.preprocess_model(
                model=model,
                dtype=compute_dtype,
                device_map={"": device},
                checkpoint_files=None,
                use_kernels=False,
            )
    experts = expert_modules(model)
    if not experts:
        raise CheckpointError(f"{checkpoint.path}: config.json describes no layer with routed experts")
    read_sizes_on_host(model)
    return Skeleton(model.eval(), architecture, experts, compute_dtype, quantizer)


def load_backbone(
    skeleton: Skeleton, entries: Mapping[str, TensorEntry], *, path: Path, device: torch.device
) -> None:
    """Load everything that is no routed expert onto `device`.

    `entries`: by checkpoint key. Raises CheckpointError when the checkpoint lacks something that
    the model needs, or has it in another shape.
    """
    model, model_class = skeleton.model, type(skeleton.model)
    mapping: Any = get_model_conversion_mapping(
        model, None, skeleton.quantizer
    )  # anew: converters keep state
    load_config = modeling_utils.LoadStateDictConfig(
        pretrained_model_name_or_path=str(path),
        dtype=skeleton.dtype,
        device_map={"": device},
        dtype_plan=model._get_dtype_plan(skeleton.dtype),
        weight_mapping=mapping,
        hf_quantizer=skeleton.quantizer,
    )
    with _no_room_for_experts_reserved(), without_bars():
        info, _ = model_class._load_pretrained_model(model, map_tensors(entries.values()), None, load_config)
    _check_shapes(info.mismatched_keys, path)
    info.missing_keys -= _mark_experts_as_loaded(skeleton)
    model_class._finalize_model_loading(model, load_config, info)
    missing = sorted(info.missing_keys - set(model.all_tied_weights_keys or {}))
    if missing:
        raise CheckpointError(
            f"{path}: {len(missing)} tensors that the model needs are not in the checkpoint, first "
            f"{', '.join(missing[:3])}. Download the checkpoint again."
        )
    if skeleton.quantizer is not None:
        skeleton.quantizer.postprocess_model(model)


def _check_shapes(mismatched: set[tuple[str, Sequence[int], Sequence[int]]], path: Path) -> None:
    if mismatched:
        name, found, expected = min(mismatched)
        raise CheckpointError(
            f"{path}: config.json says another shape than the checkpoint has for {len(mismatched)} tensors, "
            f"first {name}: {list(expected)} by config.json, {list(found)} found. Take both from the same "
            "model."
        )


@contextlib.contextmanager
def _no_room_for_experts_reserved() -> Iterator[None]:
    """Before loading, transformers takes device memory for all that the model has, to save single requests to
    the driver: experts that will never be there included."""
    modeling_utils.caching_allocator_warmup = lambda *_: None
    try:
        yield
    finally:
        modeling_utils.caching_allocator_warmup = _WARM_UP


def _mark_experts_as_loaded(skeleton: Skeleton) -> set[str]:
    """Keep transformers from allocating and initialising routed experts. Returns their parameter names."""
    names = set()
    for module_name, module in skeleton.experts.items():
        module._is_hf_initialized = True  # type: ignore[assignment]
        for name, parameter in module.named_parameters(recurse=False):
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]
            names.add(f"{module_name}.{name}")
    return names


def read_config(path: Path) -> Any:
    """transformers' configuration of a checkpoint. Raises CheckpointError when it does not understand it."""
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{path / 'config.json'}: transformers {transformers.__version__} does not understand it "
            f"({reason}); download the file again, or install the release of transformers that it needs"
        ) from error


def _set_dtype(config: Any, dtype: torch.dtype) -> None:
    """As `from_pretrained` does: a part built from a config of its own would keep the dtype in that."""
    config.dtype = dtype
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            part.dtype = dtype


def ask_to_dequantize(config: Any) -> bool:
    """Have transformers dequantize what it loads itself. False, with nothing changed, for a plain checkpoint.

    Raises CheckpointError for a quantisation that is not covered.
    """
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return False
    settings = quantization.to_dict() if hasattr(quantization, "to_dict") else quantization
    method = settings.get("quant_method") if isinstance(settings, dict) else settings
    if method not in ("fp8", "mxfp4"):
        raise CheckpointError(
            f"quantization {method!r} is not covered by this version. "
            "Covered: none (bf16, fp16, fp32), fp8 (block-wise), mxfp4"
        )
    config.quantization_config = {**settings, "dequantize": True}
    return True


def _quantizer(config: Any, device: torch.device) -> tuple[Any, Any]:
    if not ask_to_dequantize(config):
        return None, config
    quantizer, config, _ = get_hf_quantizer(config, None, {"": device}, True, {})
    return quantizer, config
