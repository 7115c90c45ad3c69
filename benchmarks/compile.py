"""Compile every kernel for every chip, with no GPU, and print what the compiler made of it.

    python benchmarks/compile.py [--chip sm_90 ...] [--format int4 ...] [--write]

Fails (exit status 1) when a decode kernel with a head dim up to 128 spills registers on an NVIDIA chip, exceeds a
chip's shared memory, or loads pages in its main loop with less than 16 bytes a thread. Exceptions: rows that are no
multiple of 16 bytes (head dims 80 and 96 below 8 bits), and gfx942, whose instructions are counted another way.

bound: clocks in which a processor can issue the main loop, over clocks in which its share of memory bandwidth
delivers the tile's bytes; above 1 the kernel cannot reach the bandwidth. Latency, barriers and conflicts are not in it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import aot
from benchmarks.views import LATENTS, SPECS, empty_view
from hf_kvcache.ops.api import AttendCall
from hf_kvcache.ops.triton import launch, run

CHIPS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "gfx942")
COMMON = ("exact", "fp8", "int8", "int4", "int2", "token4")  # on every chip; the others on sm_90 alone
SHAPES = {"exact": ((64, 1), (80, 1), (256, 1), (128, 16)), "fp8": ((256, 1),), "token4": ((64, 1),)}
COLUMNS = (
    "chip", "kernel", "warps", "registers", "spilled", "shared", "programs", "mma", "16-byte loads", "narrower",
    "loop", "bytes a token", "instr. a byte", "bound H200", "bound A100",
)  # fmt: skip


def cases(chips: list[str], formats: list[str]) -> Iterator[tuple[str, str, int, int]]:
    """(chip, format, head dim, query tokens)."""
    for chip in chips:
        for name in SPECS:
            if formats and name not in formats:
                continue
            if chip == "sm_90" or name in COMMON:
                yield chip, name, 128, 1
            if chip == "sm_90":
                for dim, queries in SHAPES.get(name, ()):
                    yield chip, name, dim, queries


def measure(chip: str, name: str, dim: int, queries: int) -> tuple[list[str], list[str]]:
    """A row of the table for a decode kernel (32 query heads, 8 KV heads, bfloat16), and what is wrong with it."""
    spec = SPECS[name]
    view = empty_view(spec, 8, dim, torch.bfloat16, tokens=32768)
    query = torch.empty(1, 32, queries, dim, dtype=torch.bfloat16)
    with aot.launches(chip) as got:
        run.decode(AttendCall(query, view, dim**-0.5), launch.CHIPS[chip])
    kernel, options = next((k, o) for n, k, o in got if n == "decode_split")
    tile = options["T"]
    page_bytes = view.layout.field_bytes("codes") + view.layout.field_bytes("scales")
    return row(chip, f"{name} D{dim} Q{queries}", kernel, options, page_bytes / tile.page / 8, tile.tokens, dim <= 128)


def measure_latent(chip: str, name: str) -> tuple[list[str], list[str]]:
    """A row of the table for absorbed MLA (128 heads, 512 + 64, bfloat16)."""
    spec = LATENTS[name]
    view = empty_view(spec, 1, 512, torch.bfloat16, tokens=32768, value_dim=64)
    with aot.launches(chip) as got:
        run.decode_latent(AttendCall(torch.empty(1, 128, 1, 576, dtype=torch.bfloat16), view, 0.1), launch.CHIPS[chip])
    kernel, options = next((k, o) for n, k, o in got if n == "latent_split")
    tile = options["T"]
    page_bytes = view.layout.field_bytes("codes") + view.layout.field_bytes("scales")
    return row(chip, f"{name} 512+64", kernel, options, page_bytes / tile.page, tile.tokens, False)


def measure_append(chip: str, name: str) -> tuple[list[str], list[str]]:
    """A row of the table for the append kernel: one token of a direct format, or whole pages."""
    spec = SPECS[name]
    layout = empty_view(spec, 8, 128, torch.bfloat16).layout
    x = torch.empty(4, 8, 1 if spec.direct else spec.page_size, 128, dtype=torch.bfloat16)
    slots = torch.zeros(4, dtype=torch.int32)
    with aot.launches(chip) as got:
        run.append(layout, x, x.clone(), torch.zeros(4, dtype=torch.int64), slots, launch.CHIPS[chip])
    _, kernel, options = got[0]
    r = aot.read(name, chip, kernel, options["num_warps"])
    cells = [chip, f"append {name} D128", str(r.warps), str(r.registers), str(r.spills), str(r.shared)]
    wrong = [f"{chip} append {name}: spills {r.spills} bytes"] if r.spills and chip.startswith("sm_") else []
    return cells + [""] * (len(COLUMNS) - len(cells)), wrong


def row(
    chip: str, name: str, kernel: Any, options: dict[str, Any], token_bytes: float, tokens: int, strict: bool
) -> tuple[list[str], list[str]]:
    """Table cells and complaints of one kernel whose main loop reads `tokens` tokens of `token_bytes` a pass."""
    r = aot.read(name, chip, kernel, options["num_warps"])
    nvidia = chip.startswith("sm_")
    limit = launch.CHIPS[chip].shared
    wide = sum(n for op, n in r.loads.items() if op.endswith(".128"))
    narrow = {op: n for op, n in r.loads.items() if op.endswith((".U8", ".U16", ".S8", ".S16"))}
    issue = r.instructions * r.warps / 4
    whole_rows = "D80" not in name and "D96" not in name
    wrong = []
    if r.shared > limit:
        wrong.append(f"{chip} {name}: {r.shared} bytes of shared memory, the chip has {limit}")
    if nvidia and strict and r.spills:
        wrong.append(f"{chip} {name}: spills {r.spills} bytes")
    if nvidia and whole_rows and (not wide or narrow):
        wrong.append(f"{chip} {name}: loads in the main loop {r.loads}")
    by_registers = 65536 // max(1, r.registers * 32 * r.warps)
    cells = [
        chip, name, str(r.warps), str(r.registers), str(r.spills), str(r.shared),
        str(min(by_registers, limit // max(1, r.shared), 32)) if nvidia else "", r.mma,
        str(wide) if nvidia else "", str(sum(narrow.values())) if nvidia else "", str(r.instructions) if nvidia else "",
        f"{token_bytes:.0f}",
    ]  # fmt: skip
    if nvidia:
        cells += [f"{r.instructions * r.warps / (token_bytes * tokens):.3f}"]
        cells += [f"{issue / aot.clocks(gpu, token_bytes * tokens):.2f}" for gpu in ("H200", "A100")]
    else:
        cells += ["", "", ""]
    return cells, wrong


def main() -> int:
    """Print the table; `--write` keeps it in benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chip", nargs="*", default=list(CHIPS), choices=CHIPS)
    parser.add_argument("--format", nargs="*", default=[], choices=list(SPECS))
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/compile-<triton>.md")
    args = parser.parse_args()
    lines = [f"triton {triton.__version__}; bfloat16, 32 query heads, 8 KV heads, pages of 64", ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    print("\n".join(lines), flush=True)
    complaints: list[str] = []
    began = time.perf_counter()
    work = [(measure, case) for case in cases(args.chip, args.format)]
    if not args.format:
        work += [(measure_latent, (chip, name)) for chip in args.chip for name in LATENTS]
        work += [(measure_append, (chip, name)) for chip in args.chip for name in ("fp8", "int8", "int4")]
    for function, case in work:
        cells, wrong = function(*case)
        complaints += wrong
        lines.append("| " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    print(f"\n{time.perf_counter() - began:.0f} s")
    print("\n".join(complaints) or "no spills, no narrow loads, shared memory within every chip's")
    if args.write:
        path = Path(__file__).parent / "results" / f"compile-{triton.__version__}.md"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(lines) + "\n")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
