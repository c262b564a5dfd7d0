"""A trace on disk: one safetensors file, readable by anything that reads safetensors.

logits  float16    [T, L, E]     router logits before any normalisation
topk    int16/32   [T, L, K]     experts chosen
tokens  int32      [T]
bounds  int64      [D + 1]       document d holds the tokens bounds[d]:bounds[d + 1]
early   float16    [T, L, E]     only where asked for: each layer's router on the input of the layer before
metadata   "format": FORMAT, "trace": JSON of TraceInfo and of the sizes L, E, K
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from hetero_runtime.checkpoint.safetensors_file import TensorEntry, read_header
from hetero_runtime.errors import CheckpointError
from hetero_runtime.whole_file import write_whole
from hetero_scheduler.trace import Trace

FORMAT = "hetero_runtime.trace/1"
Decoding = Literal["sampled", "greedy", "teacher-forced"]
_DTYPES = {"logits": ("F16",), "topk": ("I16", "I32"), "tokens": ("I32",), "bounds": ("I64",)}
_OPTIONAL = {"early": ("F16",)}
_NUM_DIMENSIONS = {"logits": 3, "topk": 3, "tokens": 1, "bounds": 1, "early": 3}
_RECORD_ANEW = "record it anew with `hetero-runtime trace`"


@dataclass(frozen=True)
class TraceInfo:
    """Where a trace comes from: what must be alike for two traces to be of the same kind."""

    model: str
    """Name of the model's folder."""
    architecture: str
    """First of `architectures` in its config.json."""
    config_sha256: str
    """Of the bytes of its config.json."""
    dtype: str
    """In which the model computed: float32, bfloat16 or float16."""
    decoding: Decoding
    """How tokens were chosen; greedy text repeats itself, and its routing is easier than real routing."""
    temperature: float
    """0 unless sampled."""
    seed: int | None
    """Of the first document; document d was drawn with seed + d. None unless sampled."""
    max_tokens: int
    """Most tokens generated for a document; 0 when teacher-forced."""
    cut: int | None
    """Most tokens of a document's own text; None where documents are whole."""
    tool_version: str
    """Of hetero_runtime."""


def write_trace(path: Path, trace: Trace, info: TraceInfo) -> None:
    """Write atomically: `path` holds the whole trace or what it held before. Raises DeviceError."""
    expert = np.int16 if trace.num_experts <= np.iinfo(np.int16).max else np.int32
    tensors: dict[str, npt.NDArray[Any]] = {
        "logits": np.ascontiguousarray(trace.logits, dtype=np.float16),
        "topk": np.ascontiguousarray(trace.topk, dtype=expert),
        "tokens": np.ascontiguousarray(trace.tokens, dtype=np.int32),
        "bounds": np.ascontiguousarray(trace.bounds, dtype=np.int64),
    }
    if trace.early is not None:
        tensors["early"] = np.ascontiguousarray(trace.early, dtype=np.float16)
    described = json.dumps(asdict(info) | _sizes(trace))
    metadata = {"format": FORMAT, "trace": described}
    write_whole(path, lambda unfinished: save_file(tensors, unfinished, metadata=metadata))


def read_trace(path: str | Path) -> tuple[Trace, TraceInfo]:
    """A trace that `write_trace` wrote.

    Raises CheckpointError, naming the field, for a file that is missing, truncated or no trace.
    """
    path = Path(path)
    entries = {entry.key: entry for entry in read_header(path)}
    _check_entries(path, entries)
    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in (_DTYPES | _OPTIONAL) if name in entries}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); {_RECORD_ANEW}") from error
    described = _read_metadata(path, metadata)
    try:
        trace = Trace(**tensors)
    except (ValueError, IndexError) as error:
        raise CheckpointError(f"{path}: its parts do not fit together: {error}; {_RECORD_ANEW}") from error
    for field, size in _sizes(trace).items():
        if described.get(field) != size:
            raise CheckpointError(
                f"{path}: metadata says {field}={described.get(field)!r}, the tensors hold "
                f"{size}; {_RECORD_ANEW}"
            )
    return trace, TraceInfo(**{field.name: described[field.name] for field in fields(TraceInfo)})


def _sizes(trace: Trace) -> dict[str, int]:
    return {"num_layers": trace.num_layers, "num_experts": trace.num_experts, "top_k": trace.top_k}


def _check_entries(path: Path, entries: dict[str, TensorEntry]) -> None:
    for name, dtypes in (_DTYPES | _OPTIONAL).items():
        if name in _OPTIONAL and name not in entries:
            continue
        if name not in entries:
            raise CheckpointError(f"{path}: is no trace: it has no tensor {name!r}; {_RECORD_ANEW}")
        entry = entries[name]
        if entry.dtype not in dtypes or len(entry.shape) != _NUM_DIMENSIONS[name]:
            raise CheckpointError(
                f"{path}: {name!r} is {entry.dtype}{list(entry.shape)}; a trace has {' or '.join(dtypes)} of "
                f"{_NUM_DIMENSIONS[name]} dimensions; {_RECORD_ANEW}"
            )


def _read_metadata(path: Path, metadata: dict[str, str]) -> dict[str, Any]:
    """The JSON of TraceInfo and sizes, with every field of TraceInfo there."""
    found = metadata.get("format")
    if found != FORMAT:
        raise CheckpointError(f"{path}: format is {found!r}, this version reads {FORMAT!r}; {_RECORD_ANEW}")
    try:
        described = json.loads(metadata.get("trace", ""))
        missing = [field.name for field in fields(TraceInfo) if field.name not in described]
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: metadata `trace` is no JSON object; {_RECORD_ANEW}") from error
    if missing:
        raise CheckpointError(f"{path}: metadata `trace` has no {', '.join(missing)}; {_RECORD_ANEW}")
    assert isinstance(described, dict), "fields were found in it"
    return described
