"""Where the traces that tests make up are said to come from."""

from __future__ import annotations

from hetero_runtime.trace import TraceInfo

INFO = TraceInfo(
    model="tiny",
    architecture="Qwen3MoeForCausalLM",
    config_sha256="0" * 64,
    dtype="float32",
    decoding="sampled",
    temperature=0.8,
    seed=3,
    max_tokens=16,
    cut=None,
    tool_version="0.1.0",
)
