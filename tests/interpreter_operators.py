"""The most frequent operations of kernels in Triton's interpreter, computed by a single NumPy call where all types are
plain.

For every operation the interpreter derives types and shapes, which takes 80 microseconds, and kernels on few numbers
run hundreds of thousands of operations. Other cases are left to the interpreter: types to be promoted, 16-bit floats,
numbers out of range."""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np
from triton import language as tl
from triton.language import core
from triton.runtime.interpreter import TensorHandle, _interpreter

PLAIN = {
    **{f"{kind}{bits}": np.dtype(f"{kind}{bits}") for kind in ("int", "uint") for bits in (32, 64)},
    **{f"fp{bits}": np.dtype(f"float{bits}") for bits in (32, 64)},
}
"""Types for which NumPy computes the same results as Triton."""
WHOLE = {name: dtype for name, dtype in PLAIN.items() if dtype.kind in "iu"}
FLOATS = {name: dtype for name, dtype in PLAIN.items() if dtype.kind == "f"}
LOGICAL = {**WHOLE, "int1": np.dtype(bool)}
CAST = {**PLAIN, **LOGICAL}
MIXED = {("int32", "int64"): tl.int64, ("int64", "int32"): tl.int64}
"""Pairs of types with the type that both are promoted to, as in NumPy."""
ZEROS = {name: np.zeros(1, dtype) for name, dtype in PLAIN.items()}
_numbers: dict[tuple, np.ndarray | None] = {}
_block_types: dict[tuple, core.block_type] = {}


def install() -> None:
    """Replace the interpreter's operators. Must be called after the interpreter has installed its own."""
    sums, bits = {**PLAIN, **MIXED}, (np.bitwise_and, np.bitwise_or, np.bitwise_xor)
    for name, of in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply)):
        _replace(core.tensor, f"__{name}__", _binary(of, sums))
    for name, of in (("radd", np.add), ("rsub", _from_right), ("rmul", np.multiply)):
        _replace(core.tensor, f"__{name}__", _binary(of, sums))
    for name, of in zip(("and", "or", "xor"), bits):
        _replace(core.tensor, f"__{name}__", _binary(of, LOGICAL))
    for name, of in (("lshift", np.left_shift), ("rshift", np.right_shift), ("mod", np.fmod), ("floordiv", _divided)):
        _replace(core.tensor, f"__{name}__", _binary(of, WHOLE))
    _replace(core.tensor, "__truediv__", _binary(np.divide, FLOATS))
    for name in ("lt", "le", "gt", "ge"):
        _replace(core.tensor, f"__{name}__", _binary(getattr(operator, name), sums, tl.int1))
    for name in ("eq", "ne"):
        _replace(core.tensor, f"__{name}__", _binary(getattr(operator, name), {**sums, **LOGICAL}, tl.int1))
    _replace(core.tensor, "__add__", _moved)
    _replace(core.tensor, "to", _cast)
    for name, of in (("minimum", np.minimum), ("maximum", np.maximum)):
        _replace(core, name, _binary(of, PLAIN))
    for name, of in (("add", np.add), ("mul", np.multiply)):
        _replace(core, name, _binary(of, WHOLE))
    for name, replacement in (("where", _where), ("load", _load), ("store", _store)):
        _replace(core, name, replacement)
    _replace(tl.math, "umulhi", _binary(_high_half, {"uint32": PLAIN["uint32"]}))
    tl.umulhi = tl.math.umulhi


def _replace(of: object, name: str, replacement: Callable[[Callable], Callable]) -> None:
    """Replace `name` in `of` by `replacement(original)`, which falls back to the original."""
    made = replacement(getattr(of, name))
    setattr(of, name, made)
    if of is core:
        setattr(tl, name, made)


def _binary(of: Callable, types: dict, made: core.dtype | None = None) -> Callable[[Callable], Callable]:
    """An operation on two tensors, or a tensor and a number. `made`: the type of the result, if it is not that of the
    operands."""

    def replacement(slow: Callable) -> Callable:
        def fast(left: core.tensor, right: object, **options: object) -> core.tensor:
            if type(left) is not core.tensor or left.dtype.name not in types:
                return slow(left, right, **options)
            dtype = left.dtype
            block = left.type is not dtype
            if type(right) is core.tensor:
                values, block = right.handle.data, block or right.type is not right.dtype
                if right.dtype is not dtype:
                    dtype = types.get((dtype.name, right.dtype.name))
            else:
                values = _number(right, dtype)
            if dtype is None or values is None:
                return slow(left, right, **options)
            return _tensor(of(left.handle.data, values), made or dtype, block)

        return fast

    return replacement


def _from_right(right: np.ndarray, left: np.ndarray) -> np.ndarray:
    return left - right


def _divided(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Quotient, rounded towards zero."""
    return (left - np.fmod(left, right)) // right


def _high_half(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Upper 32 bits of the 64-bit product."""
    return (left.astype(np.uint64) * right.astype(np.uint64) >> np.uint64(32)).astype(np.uint32)


def _tensor(values: np.ndarray, dtype: core.dtype, block: bool) -> core.tensor:
    """A tensor of `values`; a scalar is an array of one element as well."""
    return core.tensor(TensorHandle(values, dtype), _block_type(dtype, values.shape) if block else dtype)


def _block_type(dtype: core.dtype, shape: tuple[int, ...]) -> core.block_type:
    key = str(dtype), shape
    if key not in _block_types:
        _block_types[key] = core.block_type(dtype, list(shape))
    return _block_types[key]


def _number(value: object, dtype: core.dtype) -> np.ndarray | None:
    """A number converted to the type of the tensor that it is combined with, or None if it cannot be."""
    value = value.value if type(value) is tl.constexpr else value
    key = value, type(value), dtype.name
    if key not in _numbers:
        _numbers[key] = _converted(value, PLAIN.get(dtype.name))
    return _numbers[key]


def _converted(value: object, dtype: np.dtype | None) -> np.ndarray | None:
    if dtype is None or type(value) not in (int, float):
        return None
    if type(value) is float:
        # Operators disagree on rounding a float to 64 bits.
        return np.array([value or 0.0], dtype) if dtype == np.float32 else None
    low, high = (0, 2**32) if dtype.kind == "u" else (-(2**31), 2**31)
    return np.array([value], dtype) if low <= value < high else None


def _moved(slow: Callable) -> Callable:
    """A pointer plus an offset in elements: bytes wrap around, as negative offsets require."""

    def fast(pointer: core.tensor, offset: object) -> core.tensor:
        dtype = pointer.dtype
        if type(dtype) is not core.pointer_type or type(offset) is not core.tensor or offset.dtype.name not in WHOLE:
            return slow(pointer, offset)
        width = max(1, dtype.element_ty.primitive_bitwidth // 8)
        values = pointer.handle.data + width * offset.handle.data.astype(np.uint64)
        return _tensor(values, dtype, pointer.type is not dtype or offset.type is not offset.dtype)

    return fast


def _where(slow: Callable) -> Callable:
    def fast(condition: object, x: object, y: object) -> core.tensor:
        of = x if type(x) is core.tensor else y
        if type(condition) is not core.tensor or type(of) is not core.tensor or condition.dtype is not tl.int1:
            return slow(condition, x, y)
        dtype, sides = of.dtype, []
        block = condition.type is not tl.int1
        for side in (x, y):
            if type(side) is core.tensor:
                sides.append(side.handle.data if side.dtype is dtype and dtype.name in PLAIN else None)
                block = block or side.type is not side.dtype
            else:
                sides.append(_number(side, dtype))
        if sides[0] is None or sides[1] is None:
            return slow(condition, x, y)
        return _tensor(np.where(condition.handle.data, *sides), dtype, block)

    return fast


def _cast(slow: Callable) -> Callable:
    def fast(value: core.tensor, dtype: object, *rest: object, **named: object) -> core.tensor:
        to = dtype.value if type(dtype) is tl.constexpr else dtype
        if rest or named or type(to) is not core.dtype or to.name not in PLAIN or value.dtype.name not in CAST:
            return slow(value, dtype, *rest, **named)
        if to is value.dtype:
            return value
        return _tensor(value.handle.data.astype(PLAIN[to.name]), to, value.type is not value.dtype)

    return fast


def _pointed_at(pointer: core.tensor, mask: object) -> core.dtype | None:
    """The element type of a tensor of pointers, if the access is masked and the type plain; otherwise None."""
    of = pointer.dtype.element_ty if type(pointer.dtype) is core.pointer_type else None
    if of is None or of.name not in PLAIN or type(mask) is not core.tensor or mask.dtype is not tl.int1:
        return None
    return of if pointer.type is not pointer.dtype or mask.type is tl.int1 else None


def _load(slow: Callable) -> Callable:
    def fast(pointer: core.tensor, mask: object = None, other: object = None, *rest: object, **named: object):
        of, where = _pointed_at(pointer, mask), pointer.handle.data
        if of is None or rest or named:
            return slow(pointer, mask, other, *rest, **named)
        if type(other) is core.tensor:
            values = other.handle.data if other.dtype is of else None
        else:
            values = ZEROS[of.name] if other is None else _number(other, of)
        if values is None or not _fit(where, mask.handle.data, values):
            return slow(pointer, mask, other)
        masked, values = np.broadcast_to(mask.handle.data, where.shape), np.broadcast_to(values, where.shape)
        loaded = _interpreter.load(where, masked, values, PLAIN[of.name])
        return _tensor(loaded, of, pointer.type is not pointer.dtype)

    return fast


def _store(slow: Callable) -> Callable:
    def fast(pointer: core.tensor, value: object, mask: object = None, *rest: object, **named: object):
        of, where = _pointed_at(pointer, mask), pointer.handle.data
        values = value.handle.data if type(value) is core.tensor and value.dtype is of else None
        if of is None or rest or named or values is None or not _fit(where, mask.handle.data, values):
            return slow(pointer, value, mask, *rest, **named)
        masked, values = np.broadcast_to(mask.handle.data, where.shape), np.broadcast_to(values, where.shape)
        return core.tensor(_interpreter.store(where, values, masked), tl.void)

    return fast


def _fit(where: np.ndarray, *values: np.ndarray) -> bool:
    """Whether the shapes of `values` broadcast to that of the pointers."""
    return all(
        one.ndim <= where.ndim and all(size in (1, wide) for size, wide in zip(one.shape[::-1], where.shape[::-1]))
        for one in values
    )
