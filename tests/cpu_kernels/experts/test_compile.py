"""Every format compiles for every target, for machines that are not here too, to the right instructions."""

from __future__ import annotations

import pytest

from bench.cpu_expert_records import FORMATS, make_form
from hetero_cpu_kernels.experts.native import assembly
from hetero_cpu_kernels.experts.program import Program
from hetero_cpu_kernels.experts.targets import TARGETS, Target, best_target, is_executable, target

MNEMONICS = {
    "avx2": ("vfmadd", "%ymm"),
    "avx_vnni": ("vfmadd", "%ymm"),
    "avx512": ("vfmadd", "%zmm"),
    "avx512_vnni": ("vfmadd", "%zmm"),
    "avx512_bf16": ("vdpbf16ps", "%zmm"),
    "amx": ("tdpbf16ps", "tileloadd", "ldtilecfg"),
    "neon": ("fmla", ".4s"),
}
BYTE_TILES = ("tdpbssd", "tileloadd", "ldtilecfg")
ABSENT = {
    "avx2": ("%zmm", "vpdpbusd"),
    "avx_vnni": ("%zmm",),
    "avx512": ("vdpbf16ps", "tdpbf16ps", "vpdpbusd"),
    "avx512_vnni": ("vdpbf16ps",),
}


@pytest.mark.parametrize("entry", TARGETS, ids=lambda entry: entry.name)
@pytest.mark.parametrize("name", FORMATS)
def test_code_is_the_targets(entry: Target, name: str) -> None:
    if entry.name in ("avx_vnni", "avx512_vnni") and name not in ("int8", "int4"):
        pytest.skip("the code of avx2 and avx512")
    form = make_form(name, 128, 64)
    text = assembly(Program.write(form, form.up, target=entry).module, entry)
    expected = BYTE_TILES if (entry.name, name) == ("amx", "int8") else MNEMONICS[entry.name]
    assert all(mnemonic in text for mnemonic in expected)
    assert not [mnemonic for mnemonic in ABSENT.get(entry.name, ()) if mnemonic in text]


@pytest.mark.parametrize("entry", TARGETS, ids=lambda entry: entry.name)
def test_weights_are_multiplied_as_they_are_where_the_target_does(entry: Target) -> None:
    for name in ("int8", "int4", "fp8"):
        form = make_form(name, 128, 64)
        text = assembly(Program.write(form, form.up, target=entry).module, entry)
        assert ("vpdpbusd" in text) == (entry.multiplies_bytes and name in ("int8", "int4"))
        assert name != "fp8" or ("vpermt2b" in text) == entry.looks_up_bytes


@pytest.mark.parametrize("shape", [(96, 64), (128, 40)], ids=["columns", "rows"])
def test_int8_that_is_no_whole_tiles_goes_through_bfloat16(shape: tuple[int, int]) -> None:
    form, entry = make_form("int8", *shape), target("amx")
    text = assembly(Program.write(form, form.up, target=entry).module, entry)
    assert "tdpbf16ps" in text
    assert "tdpbssd" not in text


def test_odd_rows_compile_everywhere() -> None:
    form = make_form("int4", 70, 34)
    for entry in TARGETS:
        assert assembly(Program.write(form, form.down, target=entry).module, entry)


def test_the_best_target_executes() -> None:
    assert is_executable(best_target())


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown target 'avx1024'; known: avx2"):
        target("avx1024")
