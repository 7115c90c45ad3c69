"""How a call is cut into programs: one table, decided offline by shape and chip, nothing tuned at run time."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import torch

from hf_kvcache.ops.triton.sides import Side, Tile

SCRATCH_BYTES = 256 << 20  # the splits' results of one call stay below this; the allocator reuses them layer by layer


@dataclass(frozen=True)
class Chip:
    """A target: its name, number of multiprocessors, shared memory a program may have, and what it can do."""

    name: str
    processors: int
    shared: int
    assembly: bool
    native_fp8: bool


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip("sm_80", 108, 163 << 10, True, False),
        Chip("sm_86", 84, 99 << 10, True, False),
        Chip("sm_89", 142, 99 << 10, True, True),
        Chip("sm_90", 132, 227 << 10, True, True),
        Chip("sm_100", 148, 227 << 10, True, True),
        Chip("gfx942", 304, 64 << 10, False, False),
        Chip("interpreter", 4, 1 << 40, False, False),
    )
}


def interpreted() -> bool:
    """Whether Triton kernels run in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _cuda_chip(index: int) -> Chip:
    props = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        base = CHIPS["gfx942"]
        return Chip(props.gcnArchName.split(":")[0], props.multi_processor_count, base.shared, False, False)
    number = props.major * 10 + props.minor
    known = max((c for c in CHIPS.values() if c.assembly and int(c.name[3:]) <= number), key=lambda c: int(c.name[3:]))
    shared = min(known.shared, getattr(props, "shared_memory_per_block_optin", known.shared))
    return Chip(f"sm_{number}", props.multi_processor_count, shared, True, number >= 89)


def chip_of(device: torch.device) -> Chip:
    """The chip that a call on `device` is planned for."""
    if device.type == "cuda":
        return _cuda_chip(device.index if device.index is not None else torch.cuda.current_device())
    return CHIPS["interpreter"]


@dataclass(frozen=True)
class Plan:
    """Launch of one call: the tile, warps of a program, splits of the pages."""

    tile: Tile
    warps: int
    splits: int


def page_tokens(key: Side, value: Side, page: int) -> int:
    """Tokens of a tile: a whole page where planes or groups of tokens need it, else at most 64."""
    whole = value.planes > 1 or (key.per == "channel" and key.group < 64)
    return page if whole else min(page, 64)


def plan(chip: Chip, key: Side, value: Side, page: int, itemsize: int, rows: int, work: int, tokens: int) -> Plan:
    """The launch for `rows` query rows of `work` (sequences times heads) over at most `tokens` tokens each."""
    block = min(64, max(16, 1 << (rows - 1).bit_length()))
    n = page_tokens(key, value, page)
    row_bytes = sum(s.dim * (itemsize if s.kind == "exact" else 1) / s.planes for s in (key, value))
    stage = int(n * row_bytes)
    # codes keep two warps busy: fewer warps repeat less of the softmax and of the reads of q and p
    warps = 2 if chip.assembly and block == 16 and not key.kind == value.kind == "exact" else 4
    stages = 3
    while stages > 2 and stage * (stages - 1) > chip.shared // 2 - (8 << 10):
        stages -= 1
    if stage > chip.shared - (16 << 10):
        stages = 1
    blocks = -(-rows // block)
    programs = work * blocks
    splits = max(1, min(-(-2 * chip.processors // programs), -(-tokens // 256), 512))
    bound = SCRATCH_BYTES // (work * rows * value.dim * 4)
    return Plan(Tile(page, n, block, stages, 32), warps, max(1, min(splits, bound)))


def latent_plan(
    chip: Chip, latent: Side, rope: Side, page: int, itemsize: int, rows: int, work: int, tokens: int
) -> Plan:
    """The launch of absorbed MLA. Every row block reads all latents again, from the L2 cache if blocks run together.

    64 rows (Hopper's wgmma) spill, with either tile size; coded latents spill from 32 rows up.
    """
    roomy = chip.shared >= 160 << 10
    block = 32 if roomy and latent.kind == "exact" and rows > 16 else 16
    n = min(page, 64 if roomy else 32)
    stage = n * (latent.dim + rope.dim) * itemsize
    stages = 2 if stage * 2 <= chip.shared else 1
    programs = work * -(-rows // block)
    splits = max(1, min(-(-chip.processors // programs), -(-tokens // 256), 512))
    bound = SCRATCH_BYTES // (work * rows * latent.dim * 4)
    return Plan(Tile(page, n, block, stages, 32), 8 if roomy else 4, max(1, min(splits, bound)))
