"""The contract of a check: look at one side of the machine, say what it means for this runtime.

A check is a function `check(folder) -> list[Finding]` in a module of its own. It measures or reads, never
changes a setting, and takes at most a few seconds. What the machine lacks is a finding, not an exception;
an exception is turned into a finding by `guard.run_check`, so no check hides another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Status = Literal["ok", "warn", "bad", "absent"]
"""ok: nothing to do. warn: works, slower or with less room. bad: broken. absent: this machine has none."""

Value = float | int | str | bool | None

EXPERT_BYTES = 9_437_184
"""The expert that findings reckon with: one of Qwen3-30B-A3B in bf16, 3 matrices of 2048 × 768."""
EXPERT = "an expert of 9.4 MB"
BANK_GB = 60
"""The bank that findings reckon with: all experts of that model, in 10^9 bytes, rounded."""
GIB = 1 << 30


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    value: Value
    unit: str
    """Unit of `value`; empty when it has none."""
    status: Status
    meaning: str
    """What follows for this runtime, in a sentence, with a number where there is one."""


Check = Callable[[Path], list[Finding]]
"""`check(folder)`: `folder` holds the model, or is where the runtime was started."""


def expert_ms(gb_s: float) -> float:
    """Milliseconds that the reference expert takes at `gb_s` GB/s (10^9 bytes)."""
    return EXPERT_BYTES / gb_s / 1e6


def num_experts(num_bytes: int) -> int:
    """How many reference experts fit in `num_bytes`."""
    return num_bytes // EXPERT_BYTES
