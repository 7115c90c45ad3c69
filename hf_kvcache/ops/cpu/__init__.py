"""Attention straight on pages and encoding into them, for CPUs: numba for control flow, LLVM for inner kernels.

machine.py    this CPU's vectors; LLVM IR -> an address
emit.py       pieces of LLVM IR
kernels.py    the inner kernels: weights x codes, queries x keys, a step of the softmax
problem.py    the records that Python and compiled code share
plan.py       a layout and a shape -> the kernels to run and the scratch to run them in
memory.py     numba: numbers at addresses
driver.py     numba: rows, heads, splits, pages, sinks, ring, merge
encoder.py    numba: tokens -> pages, byte for byte as in formats
compiled.py   where compiled functions are kept on disk
threads.py    on how many cores, in whose pool
identity.py   values by layout object
attention.py  why_not(call), attend(call)
appending.py  write_tokens(...), write_pages(...)
"""

from hf_kvcache.ops.cpu.attention import attend, why_not

__all__ = ["attend", "why_not"]
