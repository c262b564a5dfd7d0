"""The NEON kernels, executed: by qemu's user mode, where it and binutils for aarch64 are installed.

A program without a C library: data, one call of a kernel after another, the results to standard output.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from bench.cpu_expert_records import FORMATS, Bytes, Floats, make_form, random_record, relative_error
from hetero_cpu_kernels.experts import target
from hetero_cpu_kernels.experts.activations import Layout
from hetero_cpu_kernels.experts.native import object_code
from hetero_cpu_kernels.experts.program import Program
from hetero_cpu_kernels.experts.reference import dequantize

AS, LD, QEMU = "aarch64-linux-gnu-as", "aarch64-linux-gnu-ld", "qemu-aarch64"
MISSING = [tool for tool in (AS, LD, QEMU) if shutil.which(tool) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

NEON = target("neon")
FEW, MANY = (1, 2, 4), 4
PROGRAM = """
    .data
    .balign 64
record: .incbin "record.bin"
    .balign 64
few_x: .incbin "few.bin"
    .balign 64
many_x: .incbin "many.bin"
    .balign 8
table_few: .quad {few_tokens}
table_many: .quad {many_tokens}
args_1: .quad record, 0, {rows}, table_few, results, {stride}, record, 0
args_2: .quad record, 0, {rows}, table_few, results + 1 * {size}, {stride}, record, 0
args_4: .quad record, 0, {rows}, table_few, results + 3 * {size}, {stride}, record, 0
args_panel: .quad record, 0, {rows}, panel_rows
args_many: .quad panel_rows, 0, {rows}, table_many, results + 7 * {size}, {stride}, panel_rows, 0
    .bss
    .balign 64
panel_rows: .skip {panel_bytes}
results: .skip 11 * {size}
    .text
    .global _start
_start:
    ldr x0, =args_1
    bl few_1
    ldr x0, =args_2
    bl few_2
    ldr x0, =args_4
    bl few_4
    ldr x0, =args_panel
    bl panel
    ldr x0, =args_many
    bl many_4
    mov x0, #1
    ldr x1, =results
    ldr x2, =11 * {size}
    mov x8, #64
    svc #0
    mov x0, #0
    mov x8, #93
    svc #0
"""


def laid_out(x: Floats, layout: Layout) -> Floats:
    """Activations `[T, cols]` as the kernels want them, float32 `[T, padded]`."""
    wide = np.zeros((len(x), layout.padded), dtype=np.float32)
    wide[:, : x.shape[1]] = x
    blocks = wide.reshape(len(x), -1, layout.order.size)[:, :, layout.order]
    return np.ascontiguousarray(blocks.reshape(len(x), -1))


def execute(folder: Path, program: Program, record: Bytes, x: Floats) -> Floats:
    """Results of few_1, few_2, few_4 and many_4: float32 `[1 + 2 + 4 + 4, rows]`."""
    rows = program.matrix.rows
    arrays = {"record": record, "few": laid_out(x, program.few), "many": laid_out(x, program.many)}
    for name, array in arrays.items():
        array.tofile(folder / f"{name}.bin")
    text = PROGRAM.format(
        rows=rows,
        stride=4 * rows,
        size=4 * rows,
        few_tokens=", ".join(f"few_x + {t * program.few.row_bytes}" for t in range(4)),
        many_tokens=", ".join(f"many_x + {t * program.many.row_bytes}" for t in range(MANY)),
        panel_bytes=rows * program.many.row_bytes,
    )
    (folder / "kernels.o").write_bytes(object_code(program.module, NEON))
    for command in ([AS, "-o", "start.o", "-"], [LD, "-o", "run", "start.o", "kernels.o"]):
        subprocess.run(command, cwd=folder, input=text.encode(), check=True)
    done = subprocess.run([QEMU, "run"], cwd=folder, capture_output=True, check=True)
    return np.frombuffer(done.stdout, dtype=np.float32).reshape(-1, rows)


@pytest.mark.parametrize(("rows", "cols"), [(64, 128), (34, 96), (70, 34)], ids=str)
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "packed"])
def test_the_kernels_compute_what_the_reference_does(name: str, rows: int, cols: int, tmp_path: Path) -> None:
    form, rng = make_form(name, rows, cols), np.random.default_rng(0)
    record, _ = random_record(form, rng)
    x = rng.standard_normal((4, cols)).astype(np.float32)
    found = execute(tmp_path, Program.write(form, form.down, target=NEON), record, x)
    expected = x @ dequantize(record, form.down).T
    for kernel in (found[:1], found[1:3], found[3:7], found[7:]):
        assert relative_error(kernel, expected[: len(kernel)]) < 1e-5
