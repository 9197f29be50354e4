"""The most frequent operations of kernels in Triton's interpreter, computed by a single NumPy call where all types are
plain.

For every single operation it asks which types there are, which shapes, and what becomes of them, which takes 80
microseconds; kernels that work on few numbers have hundreds of thousands of operations. What is not plain is left to
it: types to be promoted, numbers out of range."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import numpy as np
from triton import language as tl
from triton.language import core
from triton.runtime.interpreter import ReduceScanOpInterface, TensorHandle, _interpreter, interpreter_builder

PLAIN = {
    **{f"{kind}{bits}": np.dtype(f"{kind}{bits}") for kind in ("int", "uint") for bits in (32, 64)},
    **{f"fp{bits}": np.dtype(f"float{bits}") for bits in (32, 64)},
}
"""Types for which NumPy computes the same results as Triton."""
WHOLE = {name: dtype for name, dtype in PLAIN.items() if dtype.kind in "iu"}
FLOATS = {name: dtype for name, dtype in PLAIN.items() if dtype.kind == "f"}
LOGICAL = {**WHOLE, "int1": np.dtype(bool)}
CAST = {
    **PLAIN,
    **{f"{kind}{bits}": np.dtype(f"{kind}{bits}") for kind in ("int", "uint") for bits in (8, 16)},
    "fp16": np.dtype(np.float16),
}
"""Types that are cast to each other as in NumPy."""
HELD = {**CAST, "bf16": np.dtype(np.uint16), "fp8e4nv": np.dtype(np.uint8), "int1": np.dtype(np.int8)}
"""Types in memory, with the types of the arrays that hold them."""
MIXED = {("int32", "int64"): tl.int64, ("int64", "int32"): tl.int64}
"""Pairs of types with the type that both are promoted to, as in NumPy."""
DTYPES = {one.name: one for one in (*(getattr(tl, name) for name in LOGICAL), tl.float32, tl.float64)}
BITS = {"bitcast": True}
HINTS = {"eviction_policy", "cache_modifier"}
"""Arguments of a load that do not change its result."""
# Caches of read-only values.
_numbers: dict[tuple, np.ndarray | None] = {}
_filled: dict[tuple, np.ndarray] = {}
_types: dict[str | tuple, tuple] = {}
_shapes: dict[tuple, tuple[core.tuple, tl.constexpr]] = {}
_widths: dict[int, np.ndarray] = {}
_new, Tensor, Pointer = object.__new__, core.tensor, core.pointer_type


def install() -> None:
    """Replace the interpreter's operators. Must be called after the interpreter has installed its own."""
    sums, bits = {**PLAIN, **MIXED}, (np.bitwise_and, np.bitwise_or, np.bitwise_xor)
    for name, of in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply)):
        _replace(core.tensor, f"__{name}__", _binary(of, sums))
    for name, of in (("radd", np.add), ("rsub", _from_right), ("rmul", np.multiply)):
        _replace(core.tensor, f"__{name}__", _binary(of, sums))
    _replace(core.tensor, "__rtruediv__", _binary(_over, FLOATS))
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
    _replace(core.tensor, "__getitem__", _with_new_axes)
    _replace(core.tensor, "__neg__", _negated)
    made_once = (("arange", _arange), ("full", _full), ("program_id", _program_id), ("num_programs", _num_programs))
    for name, replacement in (("where", _where), ("load", _load), ("store", _store), *made_once):
        _replace(core, name, replacement)
    _replace(core, "_unwrap_if_constexpr", _unwrapped)
    _replace(tl.math, "umulhi", _binary(_high_half, {"uint32": PLAIN["uint32"]}))
    _replace(tl.math, "fma", _fused)
    tl.umulhi, tl.fma = tl.math.umulhi, tl.math.fma
    ReduceScanOpInterface.to_tensor = _reduced


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
            if type(left) is not Tensor or left.dtype.name not in types:
                return slow(left, right, **options)
            dtype = left.dtype
            if type(right) is Tensor and right.type is left.type:
                values = of(left.handle.data, right.handle.data)
                return tensor(values, made, left.type is not dtype) if made else _like(left, values)
            block = left.type is not dtype
            if type(right) is Tensor:
                values, block = right.handle.data, block or right.type is not right.dtype
                if right.dtype is not dtype:
                    dtype = types.get((dtype.name, right.dtype.name))
            else:
                values = _number(right, dtype) if dtype is not tl.int1 or made else None
                if values is not None and not made:
                    return _like(left, of(left.handle.data, values))
            if dtype is None or values is None:
                return slow(left, right, **options)
            return tensor(of(left.handle.data, values), made or dtype, block)

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


def _over(right: np.ndarray, left: np.ndarray) -> np.ndarray:
    return left / right


def tensor(values: np.ndarray, dtype: core.dtype, block: bool) -> core.tensor:
    """A tensor of `values`, as `core.tensor` makes it from a `TensorHandle`; a scalar is an array of one element as
    well."""
    key = (dtype.name, values.shape) if block else dtype.name
    handle, made = _new(TensorHandle), _new(Tensor)
    try:
        made.dtype, made.type, made.shape, made.numel = _types[key]
    except KeyError:
        known, sizes = DTYPES.get(dtype.name, dtype), values.shape if block else ()
        of = known, core.block_type(known, list(sizes)) if block else known, *shaped(sizes)
        made.dtype, made.type, made.shape, made.numel = _types[key] = of
    handle.data, handle.dtype, handle.attr, made.handle = values, made.dtype, {}, handle
    return made


def _like(of: core.tensor, values: np.ndarray) -> core.tensor:
    """A tensor of `values`, which have the type and the shape of another one: in half the time of `tensor`."""
    handle, made = _new(TensorHandle), _new(Tensor)
    handle.data, handle.attr, made.handle = values, {}, handle
    handle.dtype = made.dtype = of.dtype
    made.type, made.shape, made.numel = of.type, of.shape, of.numel
    return made


def shaped(sizes: tuple[int, ...]) -> tuple[core.tuple, tl.constexpr]:
    """Return a shape and the number of its entries, as a tensor has them. Cached, so that equal shapes are the same
    object."""
    if sizes not in _shapes:
        _shapes[sizes] = core.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))
    return _shapes[sizes]


def constant(value: bool | int | float, dtype: core.dtype) -> core.tensor:
    return tensor(_of_one_value((1,), value, LOGICAL.get(dtype.name) or PLAIN[dtype.name]), dtype, False)


def _of_one_value(shape: tuple[int, ...], value: bool | int | float, dtype: np.dtype) -> np.ndarray:
    key = shape, value, dtype.char
    try:
        return _filled[key]
    except KeyError:
        _filled[key] = np.full(shape, value or 0, dtype)
        _filled[key].flags.writeable = False
        return _filled[key]


def _number(value: object, dtype: core.dtype) -> np.ndarray | None:
    """A number converted to the type of the tensor that it is combined with, or None if it cannot be."""
    value = value.value if type(value) is tl.constexpr else value
    key = value, type(value), dtype.name
    try:
        return _numbers[key]
    except KeyError:
        _numbers[key] = _converted(value, PLAIN.get(dtype.name) or LOGICAL.get(dtype.name))
        return _numbers[key]


def _converted(value: object, dtype: np.dtype | None) -> np.ndarray | None:
    if dtype is None or type(value) not in (int, float):
        return None
    if dtype.kind == "b":
        return np.array([bool(value)]) if value in (0, 1) else None
    if type(value) is float:
        # Operators disagree on rounding a float to 64 bits.
        same = dtype.itemsize == 4 or np.float32(value) == value
        return np.array([value or 0.0], dtype) if dtype.kind == "f" and same else None
    low, high = (0, 2**32) if dtype.kind == "u" else (-(2**31), 2**31)
    return np.array([value], dtype) if low <= value < high else None


def _moved(slow: Callable) -> Callable:
    """A pointer plus an offset in elements: bytes wrap around, as negative offsets require."""

    def fast(pointer: core.tensor, offset: object) -> core.tensor:
        dtype = pointer.dtype
        if type(dtype) is not Pointer:
            return slow(pointer, offset)
        width, block = max(1, dtype.element_ty.primitive_bitwidth // 8), pointer.type is not dtype
        if type(offset) is Tensor and offset.dtype.name in WHOLE:
            values, block = offset.handle.data.astype(np.uint64), block or offset.type is not offset.dtype
            values *= _bytes(width)
        else:
            offset = offset.value if type(offset) is tl.constexpr else offset
            if type(offset) is not int:
                return slow(pointer, offset)
            values = _bytes(width * offset)
        return tensor(pointer.handle.data + values, dtype, block)

    return fast


def _bytes(number: int) -> np.ndarray:
    """Cached, because NumPy converts a number in more time than it multiplies a block."""
    if number not in _widths:
        _widths[number] = np.array(number % 2**64, np.uint64)
    return _widths[number]


def _where(slow: Callable) -> Callable:
    def fast(condition: object, x: object, y: object) -> core.tensor:
        of = x if type(x) is Tensor else y
        if type(condition) is not Tensor or type(of) is not Tensor or condition.dtype is not tl.int1:
            return slow(condition, x, y)
        dtype, sides = of.dtype, []
        plain = dtype.name in PLAIN or dtype is tl.int1 or type(dtype) is Pointer
        block = condition.type is not tl.int1
        for side in (x, y):
            if type(side) is Tensor:
                sides.append(side.handle.data if side.dtype.name == dtype.name and plain else None)
                block = block or side.type is not side.dtype
            else:
                sides.append(_number(side, dtype) if dtype is not tl.int1 else None)
        if sides[0] is None or sides[1] is None:
            return slow(condition, x, y)
        return tensor(np.where(condition.handle.data, *sides), dtype, block)

    return fast


def _cast(slow: Callable) -> Callable:
    def fast(value: core.tensor, dtype: object, *rest: object, **named: object) -> core.tensor:
        to, of = dtype.value if type(dtype) is tl.constexpr else dtype, value.dtype.name
        if named == BITS and not rest and _size(of) and _size(to.name) == _size(of):
            return tensor(value.handle.data.view(PLAIN[to.name]), to, value.type is not value.dtype)
        if rest or named or type(to) is not core.dtype:
            return slow(value, dtype, *rest, **named)
        if to.name == of:
            return value
        block = value.type is not value.dtype
        if to.name in CAST and (of in CAST or of == "int1"):
            return tensor(value.handle.data.astype(CAST[to.name]), to, block)
        if to.name == "int1" and of in WHOLE:
            return tensor(value.handle.data != 0, to, block)
        if (of, to.name) == ("bf16", "fp32"):
            return tensor(widened(value.handle.data), to, block)
        if (of, to.name) == ("fp32", "bf16"):
            return tensor(cut_off(value.handle.data), to, block)
        return slow(value, dtype)

    return fast


def _size(name: str) -> int:
    return PLAIN[name].itemsize if name in PLAIN else 0


def widened(values: np.ndarray) -> np.ndarray:
    """float32 of bfloat16."""
    return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)


def cut_off(values: np.ndarray) -> np.ndarray:
    """bfloat16 of float32, towards zero, as the interpreter has it."""
    return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def _with_new_axes(slow: Callable) -> Callable:
    def fast(value: core.tensor, slices: object) -> core.tensor:
        of_a_block = type(slices) is tuple and value.type is not value.dtype
        if of_a_block and all(one is None or (type(one) is slice and one == slice(None)) for one in slices):
            return tensor(value.handle.data[slices], value.dtype, True)
        return slow(value, slices)

    return fast


def _negated(slow: Callable) -> Callable:
    def fast(value: core.tensor, **options: object) -> core.tensor:
        if value.dtype.name not in PLAIN:
            return slow(value, **options)
        dtype = value.dtype
        zero = _of_one_value((1,), 0, PLAIN[dtype.name])
        return tensor(zero - value.handle.data, dtype, value.type is not dtype)

    return fast


def _fused(slow: Callable) -> Callable:
    def fast(x: object, y: object, z: object, **options: object) -> core.tensor:
        dtype = next((one.dtype for one in (x, y, z) if type(one) is Tensor), None)
        if dtype is None or dtype.name not in FLOATS:
            return slow(x, y, z, **options)
        values, block = [], False
        for one in (x, y, z):
            if type(one) is Tensor:
                values.append(one.handle.data if one.dtype is dtype else None)
                block = block or one.type is not one.dtype
            else:
                values.append(_number(one, dtype))
        if any(one is None for one in values):
            return slow(x, y, z, **options)
        return tensor(values[0] * values[1] + values[2], dtype, block)

    return fast


def _program_id(_slow: Callable) -> Callable:
    def fast(axis: object, **_options: object) -> core.tensor:
        return constant(interpreter_builder.grid_idx[core._unwrap_if_constexpr(axis)], tl.int32)

    return fast


def _num_programs(_slow: Callable) -> Callable:
    def fast(axis: object, **_options: object) -> core.tensor:
        return constant(interpreter_builder.grid_dim[core._unwrap_if_constexpr(axis)], tl.int32)

    return fast


def over_axis(of: np.ufunc) -> Callable[..., core.tensor | None]:
    """Return a function that combines plain numbers over one axis by `of`, as the interpreter does, and returns None
    for others."""

    def fast(given: core.tensor, axis: object = None, **options: object) -> core.tensor | None:
        axis = axis.value if type(axis) is tl.constexpr else axis
        if options or type(axis) is not int or type(given) is not Tensor or given.dtype.name not in PLAIN:
            return None
        values, block = given.handle.data, given.type is not given.dtype
        return _reduced(None, of.reduce(values, axis), given.dtype) if block and 0 <= axis < values.ndim else None

    return fast


def _reduced(_self: ReduceScanOpInterface, values: np.ndarray, dtype: core.dtype) -> core.tensor:
    """What a sum has made, a number or an array."""
    held = LOGICAL.get(dtype.name) or HELD[dtype.name]
    if getattr(values, "shape", ()):
        return tensor(values.astype(held, copy=False), dtype, True)
    return tensor(np.array([values], held), dtype, False)


def _arange(slow: Callable) -> Callable:
    ranges: dict[tuple, np.ndarray] = {}

    def fast(*ends: object, **_options: object) -> core.tensor:
        key = tuple(map(core._unwrap_if_constexpr, ends))
        if key not in ranges:
            ranges[key] = slow(*ends).handle.data
            ranges[key].flags.writeable = False
        return tensor(ranges[key], tl.int32, True)

    return fast


def _full(slow: Callable) -> Callable:
    def fast(shape: object, value: object, dtype: object, **_options: object) -> core.tensor:
        number, to = core._unwrap_if_constexpr(value), core._unwrap_if_constexpr(dtype)
        if type(number) not in (int, float) or to.name not in PLAIN:
            return slow(shape, value, dtype)
        sizes = tuple(map(core._unwrap_if_constexpr, core._unwrap_if_constexpr(shape)))
        return tensor(_of_one_value(sizes or (1,), number, PLAIN[to.name]), to, sizes != ())

    return fast


def _unwrapped(slow: Callable) -> Callable:
    plain = {core.tensor, core.dtype, core.pointer_type, bool, int, float, str, type(None), slice}

    def fast(value: object) -> object:
        kind = type(value)
        return value.value if kind is tl.constexpr else value if kind in plain else slow(value)

    return fast


def _pointed_at(pointer: core.tensor, mask: object) -> core.dtype | None:
    """The element type of a tensor of pointers, if the access is masked and the type plain; otherwise None."""
    of = pointer.dtype.element_ty if type(pointer.dtype) is Pointer else None
    if of is None or of.name not in HELD:
        return None
    if mask is None:
        return of
    if type(mask) is not Tensor or mask.dtype is not tl.int1:
        return None
    return of if pointer.type is not pointer.dtype or mask.type is tl.int1 else None


def _load(slow: Callable) -> Callable:
    def fast(pointer: core.tensor, mask: object = None, other: object = None, *rest: object, **named: object):
        of, where = _pointed_at(pointer, mask), pointer.handle.data
        if of is None or rest or not HINTS.issuperset(named):
            return slow(pointer, mask, other, *rest, **named)
        values, held = None, HELD[of.name]
        if type(other) is Tensor:
            values = other.handle.data.astype(held, copy=False) if other.dtype.name == of.name else None
        elif other is None or _is_zero(other):
            values = _of_one_value(where.shape, 0, held)
        elif of.name in PLAIN:
            values = _number(other, of)
        elif of.name == "bf16" and _number(other, tl.float32) is not None:
            values = cut_off(_number(other, tl.float32))
        masked = _of_one_value(where.shape, True, LOGICAL["int1"]) if mask is None else mask.handle.data
        if values is None or not (_fits(where, masked) and _fits(where, values)):
            return slow(pointer, mask, other)
        loaded = _interpreter.load(where, _wide(masked, where.shape), _wide(values, where.shape), held)
        loaded = loaded != 0 if of is tl.int1 else loaded
        return tensor(loaded, of, pointer.type is not pointer.dtype)

    return fast


def _store(slow: Callable) -> Callable:
    nothing = core.tensor(TensorHandle(None, tl.void), tl.void)

    def fast(pointer: core.tensor, value: object, mask: object = None, *rest: object, **named: object):
        of, where = _pointed_at(pointer, mask), pointer.handle.data
        if of is None or rest or named:
            return slow(pointer, value, mask, *rest, **named)
        values = None
        if type(value) is Tensor:
            value = value.to(of)
            values = value.handle.data.astype(HELD[of.name], copy=False)
            values = values if value.type is value.dtype or pointer.type is not pointer.dtype else None
        elif of.name in PLAIN:
            values = _number(value, of)
        masked = _of_one_value(where.shape, True, LOGICAL["int1"]) if mask is None else mask.handle.data
        if values is None or not (_fits(where, masked) and _fits(where, values)):
            return slow(pointer, value, mask)
        _interpreter.store(where, _wide(values, where.shape), _wide(masked, where.shape))
        return nothing

    return fast


def _is_zero(value: object) -> bool:
    value = value.value if type(value) is tl.constexpr else value
    return type(value) in (int, float) and value == 0


def _wide(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return values if values.shape == shape else np.broadcast_to(values, shape)


def _fits(where: np.ndarray, values: np.ndarray) -> bool:
    """Whether the shape of `values` broadcasts to that of the pointers."""
    if values.shape == where.shape:
        return True
    sizes = zip(values.shape[::-1], where.shape[::-1])
    return values.ndim <= where.ndim and all(size in (1, wide) for size, wide in sizes)
