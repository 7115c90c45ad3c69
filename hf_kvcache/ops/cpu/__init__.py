"""Decode attention straight on pages, for CPUs: numba for the control flow, LLVM for the inner kernels.

machine.py    this CPU's vectors; LLVM IR -> an address
emit.py       pieces of LLVM IR
kernels.py    the inner kernels: weights x codes, queries x keys, a step of the softmax
problem.py    the records that Python and compiled code share
plan.py       a layout and a shape -> the kernels to run and the scratch to run them in
memory.py     numba: numbers at addresses
driver.py     numba: rows, heads, splits, pages, sinks, ring, merge
threads.py    on how many cores, in whose pool
attention.py  why_not(call), attend(call)
"""

from hf_kvcache.ops.cpu.attention import attend, why_not

__all__ = ["attend", "why_not"]
