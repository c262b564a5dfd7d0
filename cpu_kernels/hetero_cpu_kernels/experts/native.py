"""Machine code from a written module, for the target that it was written for.

Compiling needs no processor of that kind: `assembly` shows what any target would execute. `NativeCode` keeps
the code alive; its addresses are good as long as it is.
"""

from __future__ import annotations

import functools
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from hetero_cpu_kernels.experts.targets import Target

_SPEED = 3


class NativeCode:
    """The functions of one module, callable by address on this machine."""

    def __init__(self, module: ir.Module, target: Target) -> None:
        machine = _machine(target)
        self._engine = llvm.create_mcjit_compiler(_optimised(module, machine, target), machine)
        self._engine.finalize_object()

    def address(self, name: str) -> int:
        """Where a function starts."""
        return int(self._engine.get_function_address(name))


def assembly(module: ir.Module, target: Target) -> str:
    """The target's assembly for a module."""
    machine = _machine(target)
    return str(machine.emit_assembly(_optimised(module, machine, target)))


def object_code(module: ir.Module, target: Target) -> bytes:
    """The target's relocatable object for a module."""
    machine = _machine(target)
    return bytes(machine.emit_object(_optimised(module, machine, target)))


def _machine(target: Target) -> Any:
    _initialize()
    return llvm.Target.from_triple(target.triple).create_target_machine(
        cpu=target.cpu, features=target.features, opt=_SPEED, jit=True
    )


@functools.cache
def _initialize() -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


def _optimised(module: ir.Module, machine: Any, target: Target) -> Any:
    module.triple = target.triple
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = False
    options.slp_vectorization = False
    options.loop_unrolling = False  # the kernels are written unrolled
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(parsed, builder)
    return parsed
