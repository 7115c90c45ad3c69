"""Compile the library's own launches for any chip with no GPU, and read what the compiler made of them.

`launches(chip)` makes Triton compile instead of launch, with a driver that only knows its target: block sizes,
strides and alignments are those of a real call. Must run without TRITON_INTERPRET.
"""

from __future__ import annotations

import collections
import functools
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

BYTES_PER_CLOCK = {"H200": (4.8e12, 132, 1.83e9), "A100": (2.04e12, 108, 1.41e9)}  # bytes/s, processors, clock


def clocks(chip: str, nbytes: float) -> float:
    """Clocks in which one processor of a chip receives `nbytes` from memory, all of them reading."""
    rate, processors, clock = BYTES_PER_CLOCK[chip]
    return nbytes / (rate / processors / clock)


class _Driver:
    """Enough of a driver for `JITFunction.run(warmup=True)`."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        return str(self.target)

    def get_current_stream(self, device: Any) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind


def target_of(chip: str) -> GPUTarget:
    """The compiler's name of a chip."""
    return (
        GPUTarget("hip", chip, 64) if chip.startswith("gfx") else GPUTarget("cuda", int(chip.removeprefix("sm_")), 32)
    )


@contextmanager
def launches(chip: str, **override: Any) -> Iterator[list[tuple[str, Any, dict[str, Any]]]]:
    """Within it, launches on CPU tensors are compiled for `chip` and listed: name, compiled kernel, options.

    override: launch options to use instead of the library's.
    """
    got: list[tuple[str, Any, dict[str, Any]]] = []
    run, driver = JITFunction.run, triton.runtime.driver
    before = driver._active

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **{**options, **override})
        got.append((self.fn.__name__, kernel, options))
        return kernel

    driver.set_active(_Driver(target_of(chip)))
    JITFunction.run = compile_only
    try:
        yield got
    finally:
        JITFunction.run, driver._active = run, before


@dataclass
class Report:
    """What one kernel became. loop: opcode counts of the main loop; spills in bytes."""

    name: str
    chip: str
    registers: int
    spills: int
    shared: int
    warps: int
    loop: collections.Counter[str] = field(default_factory=collections.Counter)
    whole: collections.Counter[str] = field(default_factory=collections.Counter)

    @property
    def instructions(self) -> int:
        """Instructions of one pass of the main loop, a warp."""
        return sum(self.loop.values())

    @property
    def mma(self) -> str:
        """The matrix instruction in use."""
        kinds = [op for op in self.whole if "MMA" in op or "mfma" in op]
        return max(kinds, key=lambda op: self.whole[op], default="none")

    @property
    def narrow(self) -> int:
        """Global loads in the main loop that move less than 16 bytes a thread."""
        return sum(n for op, n in self.loads.items() if not op.endswith(".128"))

    @property
    def loads(self) -> dict[str, int]:
        """Global loads of the main loop by opcode and width."""
        return {
            op: n for op, n in self.loop.items() if op.startswith(("LDG.", "LDGSTS.", "global_load", "buffer_load"))
        }


def _tool(name: str) -> str:
    return os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", name)


@functools.cache
def _version() -> tuple[int, ...]:
    return tuple(int(x) for x in triton.__version__.split(".")[:2])


def read(name: str, chip: str, kernel: Any, warps: int) -> Report:
    """Registers, spills, shared memory and instructions of a compiled kernel."""
    if chip.startswith("gfx"):
        return _read_amd(name, chip, kernel, warps)
    from triton.backends.nvidia.compiler import get_ptxas

    arch = int(chip.removeprefix("sm_"))
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = os.path.join(folder, "k.ptx"), os.path.join(folder, "k.cubin")
        with open(ptx, "w") as f:
            f.write(kernel.asm["ptx"])
        with open(cubin, "wb") as f:
            f.write(kernel.asm["cubin"])
        # the flags that triton itself passes: it keeps no log of a kernel that came from its cache
        flags = ["--regAllocOptLevel=2"] if _version() >= (3, 7) else []
        command = [get_ptxas(arch).path, "-v", *flags, f"--gpu-name=sm_{arch}{'a' if arch >= 90 else ''}", ptx]
        log = subprocess.run([*command, "-o", os.devnull], capture_output=True, text=True).stderr
        sass = subprocess.run([_tool("cuobjdump"), "-sass", cubin], capture_output=True, text=True).stdout
    numbers = [
        re.search(p, log) for p in (r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes spill loads")
    ]
    registers, stored, loaded = (int(m.group(1)) if m else -1 for m in numbers)
    lines = [
        (int(m.group(1), 16), m.group(2).strip())
        for m in map(re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);").match, sass.splitlines())
        if m
    ]
    report = Report(name, chip, registers, stored + loaded, kernel.metadata.shared, warps)
    report.whole = _count(lines)
    loops = []
    for at, text in lines:
        m = re.search(r"\bBRA(?:\.\S+)?\s+(?:!?U?P\w+,\s*)?(?:`\()?(0x[0-9a-f]+)", text)
        if m and int(m.group(1), 16) < at:
            inside = _count([x for x in lines if int(m.group(1), 16) <= x[0] <= at])
            loops.append(inside)
    # the main loop is the pipelined one: it multiplies, and its loads are asynchronous copies
    multiply = [c for c in loops if any("MMA" in op for op in c)]
    pipelined = [c for c in multiply if any(op.startswith(("LDGSTS", "UTMALDG")) for op in c)]
    report.loop = min(pipelined or multiply, key=lambda c: sum(c.values()), default=collections.Counter())
    return report


def _count(lines: list[tuple[int, str]]) -> collections.Counter[str]:
    out: collections.Counter[str] = collections.Counter()
    for _, text in lines:
        op = re.sub(r"^@!?U?P\w+\s+", "", text).split()[0]
        if op != "NOP":
            out[op] += 1
    return out


def _read_amd(name: str, chip: str, kernel: Any, warps: int) -> Report:
    text = kernel.asm["amdgcn"]

    def number(key: str) -> int:
        m = re.search(rf"\.{key}:\s+(\d+)", text)
        return int(m.group(1)) if m else -1

    spills = 4 * number("vgpr_spill_count")  # scalar registers spill into vector ones, not into memory
    report = Report(name, chip, number("vgpr_count"), spills, kernel.metadata.shared, warps)
    for line in text.splitlines():
        m = re.match(r"\s+((?:v|s|ds|global|buffer|flat)_\w+)", line)
        if m:
            report.whole[m.group(1)] += 1
    return report
