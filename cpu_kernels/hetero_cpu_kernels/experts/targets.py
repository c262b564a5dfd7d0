"""The instruction sets that the kernels are compiled for: parameters of one source.

    name          lanes   few tokens   of int8, int4       many tokens
    avx2            8     float32      float32             float32
    avx_vnni        8     float32      bytes (vpdpbusd)    float32
    avx512         16     float32      float32             float32
    avx512_vnni    16     float32      bytes (vpdpbusd)    float32
    avx512_bf16    16     float32      bytes (vpdpbusd)    bfloat16 pairs (vdpbf16ps)
    amx            16     float32      bytes (vpdpbusd)    bfloat16 tiles (tdpbf16ps), from 5 tokens on;
                                                           of int8 tiles of bytes (tdpbssd)
    neon            4     float32      float32             float32

A few tokens are bound by memory, which rounding does not make faster: they compute in float32, but for
weights that are cheaper not to widen so far. Then activations keep sixteen bits of the largest of a token, as
two signed bytes each (`digits`: a sum is off by 1e-4 or so). For many tokens weights and activations are
rounded to bfloat16 where an instruction multiplies those, but where tiles of bytes take the same digits.
"""

from __future__ import annotations

import functools
import platform
from dataclasses import dataclass
from typing import Literal

from hetero_cpu_kernels.isa import executes

Unit = Literal["float32", "pairs", "tiles", "digits", "digit_tiles"]
"""What multiplies: lanes of float32, pairs of bfloat16 in each lane, tiles of such pairs, four bytes in each
lane, tiles of those."""


@dataclass(frozen=True)
class Target:
    """What LLVM compiles for, and what the kernels choose by it."""

    name: str
    machine: str
    """`platform.machine()` of the processors that may have it."""
    needs: tuple[str, ...]
    """Names of `instructions` that must execute."""
    triple: str
    cpu: str
    features: str
    lanes: int
    """float32 lanes of a vector."""
    rows: int
    """Weight rows that a kernel reads side by side."""
    many: Unit = "float32"
    """What multiplies when an expert has many tokens."""
    multiplies_bytes: bool = False
    """Whether a few tokens of int8 and int4 experts are multiplied as digits."""
    few_tokens: int = 8
    """Tokens of an expert, at most, that are multiplied as few."""
    looks_up_bytes: bool = False
    """Whether fp8 is looked up as bytes of bfloat16 (`looked_up_rows`)."""

    @property
    def keeps_float32(self) -> bool:
        """Whether nothing is rounded before it is multiplied."""
        return self.many == "float32" and not self.multiplies_bytes


_X86 = "x86_64-unknown-linux-gnu"
_V4 = ("avx2", "avx512f")
_VNNI = (*_V4, "avx512_vnni")
_PAIRS = ("avx512_vbmi", "avx512_bf16")

TARGETS = (
    Target("avx2", "x86_64", ("avx2",), _X86, "x86-64-v3", "", lanes=8, rows=2),
    Target(
        "avx_vnni",
        "x86_64",
        ("avx2", "avx_vnni"),
        _X86,
        "x86-64-v3",
        "+avxvnni",
        lanes=8,
        rows=2,
        multiplies_bytes=True,
    ),
    Target("avx512", "x86_64", _V4, _X86, "x86-64-v4", "", lanes=16, rows=4),
    Target(
        "avx512_vnni",
        "x86_64",
        _VNNI,
        _X86,
        "x86-64-v4",
        "+avx512vnni",
        lanes=16,
        rows=4,
        multiplies_bytes=True,
    ),
    Target(
        "avx512_bf16",
        "x86_64",
        (*_VNNI, *_PAIRS),
        _X86,
        "x86-64-v4",
        "+avx512vnni,+avx512vbmi,+avx512bf16",
        lanes=16,
        rows=4,
        many="pairs",
        multiplies_bytes=True,
        looks_up_bytes=True,
    ),
    Target(
        "amx",
        "x86_64",
        (*_VNNI, *_PAIRS, "amx_bf16", "amx_int8"),
        _X86,
        "x86-64-v4",
        "+avx512vnni,+avx512vbmi,+avx512bf16,+amx-tile,+amx-bf16,+amx-int8",
        lanes=16,
        rows=4,
        many="tiles",
        few_tokens=4,
        multiplies_bytes=True,
        looks_up_bytes=True,
    ),
    Target("neon", "aarch64", ("neon",), "aarch64-unknown-linux-gnu", "generic", "+neon", lanes=4, rows=4),
)
"""For each machine in rising order of speed."""


def target(name: str) -> Target:
    """The target of that name. Raises ValueError for a name that is not in the table."""
    for entry in TARGETS:
        if entry.name == name:
            return entry
    raise ValueError(f"unknown target {name!r}; known: {', '.join(entry.name for entry in TARGETS)}")


def is_executable(entry: Target) -> bool:
    """Whether this machine executes all that the target needs, by trying it."""
    machine = platform.machine().lower().replace("amd64", "x86_64").replace("arm64", "aarch64")
    return machine == entry.machine and all(executes(name) for name in entry.needs)


@functools.cache
def targets_here() -> tuple[Target, ...]:
    """The targets that execute on this machine, in rising order of speed."""
    return tuple(entry for entry in TARGETS if is_executable(entry))


def best_target(*, rounds: bool = True) -> Target:
    """The fastest target that executes here; `rounds`: it may round what it multiplies. Raises RuntimeError
    where none does."""
    for entry in reversed(targets_here()):
        if rounds or entry.keeps_float32:
            return entry
    needed = ", ".join(sorted({entry.needs[0] for entry in TARGETS}))
    raise RuntimeError(f"the expert kernels need one of {needed}, and this processor executes none of them")
