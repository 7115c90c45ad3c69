"""Triton's interpreter, made right for our kernels: bfloat16, fp8, the PTX that we use, and out-of-bounds checks.

Import it with TRITON_INTERPRET=1 set and before any kernel runs. As shipped (triton 3.6 to 3.9) the interpreter
computes bfloat16 on bit patterns, truncates conversions and knows no inline assembly (triton issue 11584).
It reads private names of `triton.runtime.interpreter`; `test_triton_interpreter.py` checks the result.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# ruff: noqa: E402  (the check has to come before triton is imported)
assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1 before the first import of triton"

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interp

TORCH = {
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
LARGEST = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}
Handle = interp.TensorHandle
Builder = interp.InterpreterBuilder


# ---- conversions -----------------------------------------------------------------------------------------------


def _convert(x: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    """Bits of `source` numbers -> bits of `target` numbers, rounded to nearest even; fp8 saturates."""
    if source not in TORCH or target not in TORCH or rounding == getattr(interp._ir.ROUNDING_MODE, "RTZ", None):
        return _shipped_convert(x, source, target, rounding)
    bits = np.ascontiguousarray(x).reshape(-1).view(UNSIGNED[source.primitive_bitwidth])
    number = torch.from_numpy(bits.copy()).view(TORCH[source])
    number = number.to(torch.float64 if source == tl.float64 else torch.float32)
    if target in LARGEST:
        number = torch.where(number.isnan(), number, number.clamp(-LARGEST[target], LARGEST[target]))
    out = number.to(TORCH[target]).view(getattr(torch, f"uint{target.primitive_bitwidth}"))
    return out.numpy().reshape(np.shape(x))


_shipped_convert = interp._convert_float
interp._convert_float = _convert


def _wide(handle: Any) -> Any:
    """A bfloat16 or fp8 handle as float32."""
    scalar = handle.dtype.scalar
    if scalar == tl.bfloat16 or (scalar.is_fp8() and scalar in TORCH):
        return Handle(_convert(handle.data, scalar, tl.float32, None).view(np.float32), tl.float32)
    return handle


def _brain(data: np.ndarray) -> Any:
    return Handle(_convert(np.asarray(data, np.float32), tl.float32, tl.bfloat16, None), tl.bfloat16)


def _is_brain(handle: Any) -> bool:
    return handle.dtype.scalar == tl.bfloat16


_cast, _binary, _unary, _dot = Builder.cast_impl, Builder.binary_op, Builder.unary_op, Builder.create_dot
_BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)


def _cast_impl(self: Any, source: Any, target: Any) -> Any:
    if _is_brain(source) and target.scalar != tl.bfloat16:
        return _cast(self, _wide(source), target)
    if target.scalar == tl.bfloat16 and not _is_brain(source):
        return _brain(_wide(source).data)
    return _cast(self, source, target)


def _binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
    if _is_brain(left) and op not in _BITWISE:
        out = op(_wide(left).data, _wide(right).data)
        return Handle(out, tl.int1) if out.dtype == np.bool_ else _brain(out)
    return _binary(self, left, right, op)


def _unary_op(self: Any, value: Any, op: Any) -> Any:
    return _brain(op(_wide(value).data)) if _is_brain(value) else _unary(self, value, op)


def _create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
    return _dot(self, _wide(a), _wide(b), d, *rest)


Builder.cast_impl, Builder.binary_op, Builder.unary_op, Builder.create_dot = (
    _cast_impl,
    _binary_op,
    _unary_op,
    _create_dot,
)

_patch_tensor = interp._patch_lang_tensor


def _patch_lang_tensor(tensor: Any, *scope: Any) -> Any:
    """triton 3.6 with numpy >= 2.4: `int()` of a one-element array is an error there."""
    result = _patch_tensor(tensor, *scope)

    def index(self: Any) -> int:
        return int(np.asarray(self.handle.data).reshape(-1)[0])

    if scope:
        scope[0].set_attr(tensor, "__index__", index)
    else:
        tensor.__index__ = index
    return result


interp._patch_lang_tensor = _patch_lang_tensor

# ---- out of bounds ---------------------------------------------------------------------------------------------

_arguments: list[tuple[int, int]] = []
_allowed: list[tuple[int, int]] = []


def _extent(t: torch.Tensor) -> tuple[int, int]:
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1 if t.numel() else 0
    return t.data_ptr(), t.data_ptr() + last * t.element_size()


@contextmanager
def readable(*tensors: torch.Tensor) -> Iterator[None]:
    """Memory that kernels may reach by address, beside their tensor arguments."""
    before = len(_allowed)
    _allowed.extend(_extent(t) for t in tensors)
    try:
        yield
    finally:
        del _allowed[before:]


_init_args = interp.GridExecutor._init_args_hst


def _init_args_hst(self: Any, args: Any, kwargs: Any) -> Any:
    _arguments.clear()

    def walk(x: Any) -> None:
        if isinstance(x, (tuple, list)):
            for y in x:
                walk(y)
        elif isinstance(x, torch.Tensor):
            _arguments.append(_extent(x))

    out = _init_args(self, args, kwargs)
    walk([*out[0], *out[1].values()])
    return out


def _check(pointers: Any, mask: Any, what: str) -> None:
    addresses, active = np.broadcast_arrays(pointers.data, mask.data)
    addresses = addresses[active.astype(bool)]
    size = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
    inside = np.zeros(addresses.shape, bool)
    for low, high in (*_arguments, *_allowed):
        inside |= (addresses >= low) & (addresses + size <= high)
    if not inside.all():
        where = interp.interpreter_builder.grid_idx
        raise IndexError(f"out-of-bounds {what}: {int((~inside).sum())} of {inside.size} lanes, program {where}")


_masked_load, _masked_store = Builder.create_masked_load, Builder.create_masked_store


def _load(self: Any, pointers: Any, mask: Any, *rest: Any, **more: Any) -> Any:
    _check(pointers, mask, "load")
    return _masked_load(self, pointers, mask, *rest, **more)


def _store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **more: Any) -> Any:
    _check(pointers, mask, "store")
    return _masked_store(self, pointers, value, mask, *rest, **more)


interp.GridExecutor._init_args_hst = _init_args_hst
Builder.create_masked_load, Builder.create_masked_store = _load, _store

# ---- inline assembly -------------------------------------------------------------------------------------------


def _prmt(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Byte permutation: nibble `i` of the selector picks byte `i` of the result (no sign mode)."""
    pair = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    out = np.zeros_like(a)
    for i in range(4):
        pick = ((selector >> np.uint32(4 * i)) & np.uint32(7)).astype(np.uint64)
        out |= ((pair >> (np.uint64(8) * pick)) & np.uint64(0xFF)).astype(np.uint32) << np.uint32(8 * i)
    return out


def _halves(op: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def run(*words: np.ndarray) -> np.ndarray:
        pairs = [np.ascontiguousarray(w).view(np.float16).astype(np.float32) for w in words]
        return op(*pairs).astype(np.float16).view(np.uint32)

    return run


PTX: dict[str, Callable[..., np.ndarray]] = {
    "prmt.b32": _prmt,
    "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "xor.b32": np.bitwise_xor,
    "shr.u32": lambda a, n: a >> n,
    "shl.b32": lambda a, n: a << n,
    "mul.f16x2": _halves(lambda a, b: a * b),
}


def _inline_asm(self: Any, asm: str, constraints: str, values: Any, types: Any, pure: bool, pack: int) -> Any:
    """Run straight-line PTX on 32-bit registers that hold `pack` elements (of one byte) or fewer each."""
    shape = values[0].data.shape
    words = [w for v in values for w in np.ascontiguousarray(v.data).reshape(-1, pack).view(np.uint32).T]
    outputs = sum(c.strip().startswith("=") for c in constraints.split(","))
    registers = {f"${outputs + i}": w.copy() for i, w in enumerate(words)}

    def value(token: str) -> np.ndarray:
        return registers[token] if token in registers else np.full(words[0].shape, int(token, 0), np.uint32)

    for statement in re.sub(r"[{}]", " ", asm).split(";"):
        if statement.strip() and not statement.strip().startswith(".reg"):
            op, operands = statement.split(None, 1)
            target, *sources = (x.strip() for x in operands.split(","))
            registers[target] = PTX[op](*map(value, sources)).astype(np.uint32)
    results, first = [], 0
    for kind in types:
        number = interp._get_np_dtype(kind.scalar)
        count = pack * number.itemsize // 4
        stacked = np.stack([registers[f"${first + i}"] for i in range(count)], 1)
        results.append(Handle(np.ascontiguousarray(stacked).view(number).reshape(shape), kind.scalar))
        first += count

    class Results:
        def get_result(self, i: int) -> Any:
            return results[i]

    return Results()


Builder.create_inline_asm = _inline_asm
