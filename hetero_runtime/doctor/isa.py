"""Instruction sets that execute here, which is not always what the processor claims."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

from hetero_cpu_kernels.isa import InstructionSet, probe_isa
from hetero_runtime.doctor.base import Finding

_USE = {
    "avx2": "CPU experts compute 8 floats at once; the least that the x86 kernels want",
    "avx512f": "CPU experts compute 16 floats at once",
    "avx_vnni": "int8 and int4 CPU experts multiply 32 bytes at once, a few tokens each",
    "avx512_vnni": "int8 and int4 CPU experts multiply 64 bytes at once, a few tokens each",
    "avx512_vbmi": "fp8 CPU experts are looked up as bf16, 64 at once, where avx512_bf16 executes",
    "avx512_bf16": "bf16 experts multiply without widening",
    "avx512_fp16": "fp16 experts multiply without widening",
    "amx_bf16": "prefill of CPU experts runs on matrix tiles, where amx_int8 executes too",
    "amx_int8": "prefill of int8 CPU experts runs on tiles of bytes, where amx_bf16 executes too",
    "neon": "CPU experts compute 4 floats at once",
    "sve": "CPU experts use the full vector width of this core",
}
_WITHOUT = {
    "avx2": "CPU experts fall back to scalar code, several times slower",
    "avx512f": "CPU experts fall back to AVX2",
    "avx_vnni": "int8 and int4 CPU experts are widened to float32 first",
    "avx512_vnni": "int8 and int4 CPU experts are widened to float32 first",
    "avx512_vbmi": "CPU experts use no avx512_bf16 and no tiles: the kernels want both",
    "avx512_bf16": "bf16 CPU experts are widened to float32, which costs little at one token",
    "avx512_fp16": "fp16 CPU experts are widened to float32, which costs little at one token",
    "amx_bf16": "prefill of CPU experts falls back to AVX-512 or AVX2",
    "amx_int8": "CPU experts use no tiles: the kernels want those of bf16 and of int8",
    "neon": "CPU experts fall back to scalar code, several times slower",
    "sve": "CPU experts stay with NEON",
}


def check(folder: Path) -> list[Finding]:
    """One finding an instruction set of this machine."""
    return judge(probe_isa(), platform.machine())


def judge(sets: Sequence[InstructionSet], machine: str) -> list[Finding]:
    """Findings for what was tried; a set that is claimed and does not execute is a warning."""
    if not sets:
        meaning = f"no instruction sets are known for {machine}: CPU experts run as numba compiles them"
        return [Finding("ISA", machine, "", "absent", meaning)]
    return [_judge_one(one) for one in sets]


def _judge_one(one: InstructionSet) -> Finding:
    name = f"ISA {one.name}"
    if one.executes:
        note = "" if one.is_claimed else " (not listed in /proc/cpuinfo, executes all the same)"
        return Finding(name, True, "", "ok", _USE[one.name] + note)
    if one.is_claimed:
        meaning = f"claimed by /proc/cpuinfo but does not execute here ({one.detail}): {_WITHOUT[one.name]}"
        return Finding(name, False, "", "warn", meaning)
    return Finding(name, False, "", "absent", f"{_WITHOUT[one.name]} ({one.detail})")
