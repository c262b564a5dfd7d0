"""One call's work as the compiled job reads it: records of 64-bit numbers, most of them addresses."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hetero_cpu_kernels.experts.activations import TILE
from hetero_cpu_kernels.experts.program import Program

FEW_TOKENS = 8
"""An expert with more tokens decodes its rows once for all of them; on some targets with fewer, too."""
FEW_RUN = 512
"""Rows that up to `TOKENS_AT_ONCE` tokens are computed with before their results are used."""
MANY_RUN = 32
"""Rows of a panel: in the second-level cache, with a block of tokens in the first."""

FLOAT_CODES = {"float32": 0, "float16": 1, "bfloat16": 2}
GATE_CODES = {"silu": 0, "clamped_silu": 1, "gpt_oss": 2}


def _record(*names: str) -> np.dtype[np.void]:
    return np.dtype([(name, np.int64) for name in names])


LAYOUT = _record(
    *(
        "unit",
        "at",
        "order_at",
        "place_at",
        "block",
        "padded",
        "row_bytes",
        "panel_row_bytes",
        "rows_at",
        "read_at",
    ),
)
"""`activations.Layout` at an address. `rows_at`: int64 [pairs], which of its rows each pair reads; `read_at`:
where in a row, or in a group of tiles, the kernels begin, in bytes."""

PROJECTION = np.dtype(
    [
        *((name, np.int64) for name in ("rows", "cols", "few_1", "few_2", "few_4")),
        *((name, np.int64) for name in ("many_1", "many_2", "many_4", "panel", "tiles", "digits")),
        *((name, np.int64) for name in ("inputs", "gate", "add", "tiles_on_the_way", "on_the_way_groups")),
        *((name, np.int64) for name in ("is_direct", "offset", "row_bytes")),
        *((name, np.int64) for name in ("bias_offset", "bias_encoding")),
        *((name, np.int64) for name in ("is_packed", "first_element", "table_at", "escapes_at")),
        ("few", LAYOUT),
        ("many", LAYOUT),
    ]
)
"""One matrix: its kernels, and its input's layouts for few and for many tokens. `on_the_way_groups`: groups
of 16 tokens, at most, that `tiles_on_the_way` multiplies; others need a panel."""

PLAN = np.dtype(
    [
        *((name, np.int64) for name in ("control", "num_tokens", "num_experts", "hidden", "inner")),
        *((name, np.int64) for name in ("has_few", "has_many", "few_tokens", "num_pairs")),
        *((name, np.int64) for name in ("hidden_at", "out_at", "records_at", "bounds_at")),
        *((name, np.int64) for name in ("tokens_at", "weights_at")),
        *((name, np.int64) for name in ("scratch_at", "scratch_bytes", "results")),
        *((name, np.int64) for name in ("gate", "is_interleaved")),
        ("limit", np.float64),
        ("alpha", np.float64),
        ("up", PROJECTION),
        ("down", PROJECTION),
    ]
)
"""One call. `few_tokens`: of an expert, at most, for the kernels of few. `results`: float32 values of each
worker's scratch, in front of its panel."""

ARGUMENT_BYTES = 64 + 8 * 1024
"""Of a worker's scratch: what a kernel is called with, and addresses of the tokens' activations."""
COUNTER_BYTES = 64
"""At the end of a worker's scratch: what `stretch` counts, on a cache line of its own."""
MOST_TOKENS = 1024
"""Tokens of one expert in one call."""


NUMBER_FIELDS = (
    *("num_tokens", "num_experts", "num_pairs", "has_few", "has_many", "few_tokens"),
    *("scratch_at", "scratch_bytes", "results"),
    *("up.few.at", "up.few.rows_at", "up.many.at", "up.many.rows_at"),
    *("down.few.at", "down.few.rows_at", "down.many.at", "down.many.rows_at"),
)
"""What `layer` writes anew for each call, in its order."""
ADDRESS_FIELDS = ("hidden_at", "out_at", "records_at", "bounds_at", "tokens_at", "weights_at")
"""What `call` writes anew for each call, in its order."""


def word_of(path: str) -> int:
    """Which 64-bit word of a `PLAN` a field is, such as `up.few.at`."""
    kind, offset = PLAN, 0
    for name in path.split("."):
        fields = kind.fields
        assert fields is not None, f"{path} leads into a number"
        kind, start = fields[name][:2]
        offset += start
    return offset // 8


def address_of(array: npt.NDArray[np.generic]) -> int:
    """Where an array's first element lies."""
    return int(array.__array_interface__["data"][0])


def scratch_parts(most_tokens: int, programs: tuple[Program, Program]) -> tuple[int, int]:
    """`results` and bytes of each worker's scratch, for experts of up to so many tokens."""
    results = max(2 * FEW_RUN * 4, 2 * MANY_RUN * (-(-most_tokens // TILE) * TILE))
    panel = MANY_RUN * max(program.many.panel_row_bytes for program in programs)
    total = ARGUMENT_BYTES + 4 * (FEW_RUN + results) + panel + COUNTER_BYTES
    return results, -(-total // 4096) * 4096
