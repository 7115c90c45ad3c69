"""This machine's vectors, and the compiler that turns a kernel's LLVM IR into an address."""

from __future__ import annotations

import functools
import platform
from typing import NamedTuple

import llvmlite.binding as llvm
from llvmlite import ir


class Vectors(NamedTuple):
    """lanes: float32 values in a vector; registers: vector registers that a kernel may hold values in."""

    lanes: int
    registers: int


@functools.cache
def _target() -> llvm.TargetMachine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3, jit=True
    )


@functools.cache
def vectors() -> Vectors:
    """The widest vectors that this CPU has."""
    features = llvm.get_host_cpu_features()
    if features.get("avx512f") and features.get("avx512bw") and features.get("avx512vl"):
        return Vectors(16, 32)
    if features.get("avx2") and features.get("fma"):
        return Vectors(8, 16)
    return Vectors(4, 32 if platform.machine() in ("aarch64", "arm64") else 16)


@functools.cache
def _engine() -> llvm.ExecutionEngine:
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target())


def compile_kernel(module: ir.Module, name: str) -> int:
    """Compile a module and return the address of its function `name`. The code lives as long as the process."""
    module.triple = _target().triple
    module.data_layout = str(_target().target_data)
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    builder = llvm.create_pass_builder(_target(), llvm.create_pipeline_tuning_options(speed_level=2))
    builder.getModulePassManager().run(parsed, builder)
    engine = _engine()
    engine.add_module(parsed)
    engine.finalize_object()
    return int(engine.get_function_address(name))
