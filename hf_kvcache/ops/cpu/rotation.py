"""The block-wise Hadamard rotation, compiled: one IEEE operation after another, nothing reordered or contracted."""

from __future__ import annotations

import math

from numba import float32, njit

from hf_kvcache.ops.cpu.memory import get_float, put_float


@njit
def rotate(at, count, block):
    """Rotate `count` float32 numbers in place: the butterflies of `formats.hadamard.rotate`, in the same order."""
    for first in range(0, count, block):
        distance = 1
        while distance < block:
            for low in range(first, first + block, 2 * distance):
                for i in range(low, low + distance):
                    a, b = get_float(at, i), get_float(at, i + distance)
                    put_float(at, i, a + b)
                    put_float(at, i + distance, a - b)
            distance *= 2
    factor = float32(1.0 / math.sqrt(block))
    for i in range(count):
        put_float(at, i, get_float(at, i) * factor)
