"""Run a compiled function on several threads: torch's own OpenMP pool where it can be reached, else Python threads.

Sharing torch's pool means that no thread of ours competes with one of torch's that still spins for its next task.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

Function = Callable[[int], None]
TYPE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@functools.cache
def _openmp() -> Callable[[int, int, int, int], None] | None:
    """`GOMP_parallel(function, data, threads, flags)` of the OpenMP runtime that torch loaded."""
    try:
        parallel = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):  # another runtime, or a platform without a global symbol table
        return None
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return parallel  # type: ignore[no-any-return]


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="hf-kvcache")


@functools.cache
def _callable(address: int) -> Function:
    return TYPE(address)


def run(address: int, data: int, threads: int) -> None:
    """Call the function at `address`, `void (void *)`, with `data` on `threads` threads, and wait for all."""
    if threads == 1:
        _callable(address)(data)
        return
    parallel = _openmp()
    if parallel is not None:
        parallel(address, data, threads, 0)
        return
    function = _callable(address)
    others = [_pool(threads - 1).submit(function, data) for _ in range(threads - 1)]
    function(data)
    for other in others:
        other.result()
