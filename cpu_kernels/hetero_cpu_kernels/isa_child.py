"""Executes one instruction after another and says so; dies on the first that this machine refuses.

    python -m hetero_cpu_kernels.isa_child avx2 avx512f amx_bf16

Standard output, one line flushed at each moment:

    start NAME              about to execute; if nothing follows, this one killed the process
    result NAME NUMBER      it executed and left NUMBER
    refused NAME REASON     the kernel did not grant what the instruction needs

`isa.py` reads these lines. The code is made by numba's own back end (llvmlite) from inline assembly:
an assembler accepts every instruction, whatever the processor claims, and a probe costs milliseconds
where a numba function costs a tenth of a second.
"""

from __future__ import annotations

import ctypes
import resource
import sys

import llvmlite.binding as llvm

from hetero_cpu_kernels.amx import request_amx
from hetero_cpu_kernels.instructions import Instruction, instruction


def _scratch() -> ctypes.Array[ctypes.c_uint8]:
    """128 bytes: palette 1 with tiles 0 to 2 of one row of four bytes, then 64 free bytes."""
    scratch = (ctypes.c_uint8 * 128)()
    scratch[0] = 1
    for tile in range(3):
        scratch[16 + 2 * tile] = 4  # bytes in a row, 16 bits, little-endian
        scratch[48 + tile] = 1  # rows
    return scratch


def _execute(probe: Instruction) -> int:
    """Compile the probe, run it, and give the 32-bit number that it left."""
    lines = "\\0A".join(probe.assembly)
    module = llvm.parse_assembly(f"""
        define i32 @probe(i32 %operand, ptr %scratch) {{
          %result = call i32 asm sideeffect "{lines}", "=&r,r,r,~{{memory}}"(i32 %operand, ptr %scratch)
          ret i32 %result
        }}""")
    machine = llvm.Target.from_default_triple().create_target_machine()
    with llvm.create_mcjit_compiler(module, machine) as engine:
        engine.finalize_object()
        address = engine.get_function_address("probe")
        function = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)(address)
        scratch = _scratch()  # named, so that it lives through the call
        return int(function(probe.operand, ctypes.addressof(scratch)))


def main(names: list[str]) -> None:
    """Execute the probes called `names` in this order."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # dying is expected here: leave no core file
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()
    for probe in map(instruction, names):
        print("start", probe.name, flush=True)
        refusal = request_amx() if probe.is_tiled else ""
        if refusal:
            print("refused", probe.name, refusal, flush=True)
        else:
            print("result", probe.name, _execute(probe), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
