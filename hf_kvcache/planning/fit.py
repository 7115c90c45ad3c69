"""What fits: for every cache its bytes, the longest context, the largest batch and the time that reading takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hf_kvcache.config import cache_names, resolve
from hf_kvcache.planner import DTYPE_BYTES, LayerShape, kinds, total, unserved

MOST = 2**40  # tokens or rows: past it nothing limits them
DYNAMIC = "dynamic"  # transformers' own cache: every number in the model's dtype, no page


@dataclass(frozen=True)
class Room:
    """What a cache has to live with. memory: bytes to use, or None; weights: bytes of them in memory.

    read: function of the batch to the bytes of weights that a decode step reads. bandwidth: bytes per second, or None.
    """

    memory: int | None
    weights: int
    read: Callable[[int], int]
    bandwidth: float | None


@dataclass(frozen=True)
class Fit:
    """One cache at one batch and context.

    bytes_per_token: `nbytes` over all tokens. longest_context, largest_batch: what the memory allows, the other one
    being as asked (0: not even one), or None where nothing limits it or no memory was given. floor_ms: the least
    time of a decode step, weights and cache read once at full bandwidth. fits: or None without a memory.
    """

    name: str
    nbytes: int
    bytes_per_token: float
    bits: float
    longest_context: int | None
    largest_batch: int | None
    floor_ms: float | None
    fits: bool | None


def fits(layers: list[LayerShape], batch: int, context: int, room: Room, dtype: str) -> list[Fit]:
    """A row for `dynamic` and for every cache name that such layers can have. Raises ConfigError for an unknown dtype."""
    names = [DYNAMIC, *(name for name in cache_names() if unserved(layers, resolve(name)) is None)]
    return [_fit(name, _size(layers, name, dtype), batch, context, room) for name in names]


def _size(layers: list[LayerShape], name: str, dtype: str) -> Callable[[int, int], tuple[int, int]]:
    """A function of batch and context to the cache's bytes and the numbers it stands for."""
    config = resolve("paged_exact" if name == DYNAMIC else name)
    layer_kinds = kinds(layers, config, dtype)

    def size(batch: int, context: int) -> tuple[int, int]:
        plan = total(layer_kinds, config, batch, context)
        return (plan.elements * DTYPE_BYTES[dtype] if name == DYNAMIC else plan.nbytes), plan.elements

    return size


def _fit(name: str, size: Callable[[int, int], tuple[int, int]], batch: int, context: int, room: Room) -> Fit:
    nbytes, elements = size(batch, context)
    longest = largest = ok = None
    if room.memory is not None:
        left = room.memory - room.weights
        ok = nbytes <= left
        longest = most(lambda tokens: size(batch, tokens)[0] <= left)
        largest = most(lambda rows: size(rows, context)[0] <= left)
    floor = None if room.bandwidth is None else 1000 * (room.read(batch) + nbytes) / room.bandwidth
    bits = 8 * nbytes / elements if elements else 0.0
    return Fit(name, nbytes, nbytes / (batch * context), bits, longest, largest, floor, ok)


def most(holds: Callable[[int], bool]) -> int | None:
    """The largest whole number from 1 for which `holds`, if it holds up to there only; 0 for none, None for no end."""
    if not holds(1):
        return 0
    low, high = 1, 2
    while holds(high):
        low, high = high, 2 * high
        if high > MOST:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
