"""One real instruction for each instruction set that the kernels may use.

Every entry is a few lines of assembly around the instruction, with a small sum whose answer is known:
an instruction that traps is found by its signal, one that is emulated wrongly by its answer.

    $0  32-bit result        $1  32-bit operand        $2  address of 128 bytes of scratch

The scratch starts with an AMX tile configuration (64 bytes: three tiles of one row of four bytes);
the second half is free. Assembly is AT&T syntax on x86, as LLVM expects.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Instruction:
    """One probe: run `assembly` with `operand` and expect `expected`."""

    name: str
    """Name of the instruction set, as the kernels ask for it."""
    machine: str
    """`platform.machine()` of the processors that may have it."""
    flags: tuple[str, ...]
    """What /proc/cpuinfo lists when the processor claims it; all must be there."""
    assembly: tuple[str, ...]
    operand: int
    expected: int
    is_tiled: bool = False
    """AMX: the process must ask the kernel for tile registers first."""


_ONE_FLOAT = 0x3F800000
_TWO_FLOAT = 0x40000000
_TWO_BF16_ONES = 0x3F803F80
_TWO_FP16_ONES = 0x3C003C00
_TWO_FP16_TWOS = 0x40004000
_FOUR_BYTE_ONES = 0x01010101


def _zmm(*lines: str) -> tuple[str, ...]:
    """Broadcast the operand to zmm0, clear zmm1, run `lines`, return the lowest lane of zmm1."""
    head = ("vpbroadcastd $1, %zmm0", "vpxord %zmm1, %zmm1, %zmm1")
    return (*head, *lines, "vmovd %xmm1, $0", "vzeroupper")


def _tiles(product: str) -> tuple[str, ...]:
    """One product of one-row tiles.

    With a single row the stride of a tile load is never used, so the base register stands in for it.
    """
    return (
        "ldtilecfg ($2)",
        "movl $1, 64($2)",
        "tileloadd 64($2,$2,1), %tmm1",
        "tileloadd 64($2,$2,1), %tmm2",
        "tilezero %tmm0",
        f"{product} %tmm2, %tmm1, %tmm0",
        "tilestored %tmm0, 64($2,$2,1)",
        "tilerelease",
        "movl 64($2), $0",
    )


_AVX2 = (
    "vmovd $1, %xmm0",
    "vpbroadcastd %xmm0, %ymm0",
    "vfmadd231ps %ymm0, %ymm0, %ymm0",
    "vmovd %xmm0, $0",
    "vzeroupper",
)
_AVX_VNNI = (
    "vmovd $1, %xmm0",
    "vpxor %xmm1, %xmm1, %xmm1",
    "{vex} vpdpbusd %xmm0, %xmm0, %xmm1",
    "vmovd %xmm1, $0",
    "vzeroupper",
)
_NEON = ("dup v0.4s, ${1:w}", "add v0.4s, v0.4s, v0.4s", "fmov ${0:w}, s0")
_SVE = (".arch_extension sve", "mov z0.s, ${1:w}", "add z0.s, z0.s, z0.s", "fmov ${0:w}, s0")

INSTRUCTIONS: tuple[Instruction, ...] = (
    Instruction("avx2", "x86_64", ("avx2", "fma"), _AVX2, _ONE_FLOAT, _TWO_FLOAT),
    Instruction("avx_vnni", "x86_64", ("avx_vnni",), _AVX_VNNI, _FOUR_BYTE_ONES, 4),
    Instruction("avx512f", "x86_64", ("avx512f",), _zmm("vpaddd %zmm0, %zmm0, %zmm1"), 21, 42),
    Instruction(
        "avx512_vnni", "x86_64", ("avx512_vnni",), _zmm("vpdpbusd %zmm0, %zmm0, %zmm1"), _FOUR_BYTE_ONES, 4
    ),
    Instruction(
        "avx512_vbmi",
        "x86_64",
        ("avx512vbmi",),
        _zmm("vpermb %zmm0, %zmm0, %zmm1"),
        _FOUR_BYTE_ONES,
        _FOUR_BYTE_ONES,
    ),
    Instruction(
        "avx512_bf16",
        "x86_64",
        ("avx512_bf16",),
        _zmm("vdpbf16ps %zmm0, %zmm0, %zmm1"),
        _TWO_BF16_ONES,
        _TWO_FLOAT,
    ),
    Instruction(
        "avx512_fp16",
        "x86_64",
        ("avx512_fp16",),
        _zmm("vaddph %zmm0, %zmm0, %zmm1"),
        _TWO_FP16_ONES,
        _TWO_FP16_TWOS,
    ),
    Instruction(
        "amx_bf16",
        "x86_64",
        ("amx_tile", "amx_bf16"),
        _tiles("tdpbf16ps"),
        _TWO_BF16_ONES,
        _TWO_FLOAT,
        is_tiled=True,
    ),
    Instruction(
        "amx_int8",
        "x86_64",
        ("amx_tile", "amx_int8"),
        _tiles("tdpbssd"),
        _FOUR_BYTE_ONES,
        4,
        is_tiled=True,
    ),
    Instruction("neon", "aarch64", ("asimd",), _NEON, 21, 42),
    Instruction("sve", "aarch64", ("sve",), _SVE, 21, 42),
)
"""In order of rising risk for each machine: a probe that kills its process costs a restart."""


def instruction(name: str) -> Instruction:
    """The probe of one instruction set. Raises ValueError for a name that is not in the table."""
    for entry in INSTRUCTIONS:
        if entry.name == name:
            return entry
    raise ValueError(f"unknown instruction set {name!r}; known: {', '.join(e.name for e in INSTRUCTIONS)}")
