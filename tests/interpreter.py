"""Triton's interpreter, with corrections and faster replacements of its slow parts, for machines without a GPU. It must
be imported before any kernel: a kernel reads the setting when it is defined."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import partial
from itertools import product

import numpy as np
import torch

os.environ.setdefault("TRITON_INTERPRET", "1")

from triton import language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from tests import interpreter_operators

_patch_lang_tensor = interpreter._patch_lang_tensor
_generic_reduce = interpreter.ReduceOps.generic_reduce
_convert_float, _get_np_dtype = interpreter._convert_float, interpreter._get_np_dtype
_make_block_type, _broadcast = core.block_type.__init__, TritonSemantic.broadcast_impl_value
_check, _equal_types = TritonSemantic.binary_op_type_checking_impl, core.dtype.__eq__
_to_tensor, _patch_attr = TritonSemantic.to_tensor, interpreter._patch_attr
_argument = interpreter._implicit_cvt
_SUMS = {("smc.kernels.norm", "pair_sum"): True, ("smc.kernels.truncation", "block_sum"): False}
"""Functions that add halves of the last axis until one entry is left, with whether they return a block."""
_REDUCTIONS = {
    function: interpreter_operators.over_axis(of)
    for function, of in ((tl.sum, np.add), (tl.max, np.fmax), (tl.min, np.fmin))
}
_pointer_types: dict[torch.dtype, core.dtype] = {}
_np_dtypes: dict[str, np.dtype] = {}
_block_types: dict[tuple, dict] = {}
_kernels: dict[interpreter.InterpretedFunction, tuple[set[str], set[str], dict[str, object]]] = {}
_replacements: dict[interpreter.InterpretedFunction, Callable | None] = {}


def _patch_index(tensor, scope) -> None:
    """Triton 3.6's interpreter holds a scalar as an array of one element, which numpy 2.4 no longer accepts as the
    bound of a loop."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def _dot(self, a, b, d, *_):
    """Multiply row by row. The interpreter multiplies all rows at once by the library, which on some processors sums
    the terms of a row in an order that depends on the rows beside it; a tensor core does not."""
    of_rows = np.matmul(_wide(a)[:, None], np.ascontiguousarray(_wide(b)), dtype=d.data.dtype)
    return interpreter.TensorHandle(of_rows[:, 0] + d.data, d.dtype.scalar)


def _wide(x) -> np.ndarray:
    """The interpreter holds the types that NumPy lacks, bfloat16 and those of 8 bits, as integers."""
    if x.dtype.scalar == tl.bfloat16:
        return interpreter._convert_float(x.data, x.dtype, tl.float32, None).view(np.float32)
    if x.dtype.primitive_bitwidth == 8 and x.dtype.is_floating():
        return interpreter._convert_float(x.data, x.dtype, tl.float16, None).view(np.float16)
    return x.data


def _reduce(self, given):
    """The interpreter combines one element after another. This combines one half of the array with the other half at
    once."""
    arrays = [tensor.handle.data for tensor in given]
    if self.axis != 0 or self.keep_dims or arrays[0].ndim != 1:
        return _generic_reduce(self, given)
    while len(arrays[0]) > 1:
        half = len(arrays[0]) // 2
        pairs = [
            self.to_tensor(array[part], tensor.dtype)
            for part in (slice(half), slice(half, 2 * half))
            for array, tensor in zip(arrays, given)
        ]
        made = self.combine_fn.fn(*pairs)
        made = made if isinstance(made, tuple) else (made,)
        arrays = [np.concatenate((one.handle.data, array[2 * half :])) for one, array in zip(made, arrays)]
    return [self.to_tensor(array.item(), tensor.dtype) for array, tensor in zip(arrays, given)]


def _scan(self, given):
    """The interpreter combines one element after another. This combines all elements at once with their predecessors at
    distance 1, then 2, 4 and so on."""
    arrays, distance = [np.moveaxis(tensor.handle.data, self.axis, 0) for tensor in given], 1
    while distance < len(arrays[0]):
        before = [np.roll(array, distance, 0) for array in arrays]
        pairs = [self.to_tensor(array, tensor.dtype) for part in (before, arrays) for array, tensor in zip(part, given)]
        made = self.combine_fn.fn(*pairs)
        made = made if isinstance(made, tuple) else (made,)
        arrays = [np.concatenate((array[:distance], one.handle.data[distance:])) for one, array in zip(made, arrays)]
        distance *= 2
    return [self.to_tensor(np.moveaxis(array, 0, self.axis), tensor.dtype) for array, tensor in zip(arrays, given)]


def _convert(data, from_type, to_type, rounding):
    """When the interpreter rounds to FP8, it loses the carry out of the mantissa: torch converts instead."""
    if (from_type.name, to_type.name) == ("bf16", "fp32"):
        return interpreter_operators.widened(data)
    if (from_type.name, to_type.name, rounding) == ("fp32", "bf16", None):
        return interpreter_operators.cut_off(data)
    if to_type != tl.float8e4nv:
        return _convert_float(data, from_type, to_type, rounding)
    return torch.from_numpy(data.astype(np.float32)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def _np_dtype(of: tl.dtype) -> np.dtype:
    """The interpreter builds a table of all types for every value: cache the result."""
    name = of.scalar.name
    if name not in _np_dtypes:
        _np_dtypes[name] = _get_np_dtype(of)
    return _np_dtypes[name]


def _block_type(self, element_ty: tl.dtype, shape) -> None:
    """The interpreter formats the name of every block's type and the types of the numbers in its shape: cache both."""
    key = (element_ty.name, *(one.value if isinstance(one, tl.constexpr) else one for one in shape))
    if key not in _block_types:
        _make_block_type(self, element_ty, shape)
        _block_types[key] = {name: value for name, value in vars(self).items() if name != "element_ty"}
    self.element_ty = element_ty
    vars(self).update(_block_types[key])


def _tensor(self, handle, type: tl.dtype) -> None:
    """The interpreter creates the shape of every value anew: cache shapes."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = interpreter_operators.shaped((*type.shape,) if type.is_block() else ())


def _to_one_shape(self, left, right) -> tuple:
    """The interpreter creates a new shape even if both operands already have the same one."""
    return (left, right) if left.shape is right.shape else _broadcast(self, left, right)


def _checked(
    self, left, right, allow_left_pointer=False, allow_right_pointer=False, arithmetic=True, div_or_mod=False
) -> tuple:
    """The interpreter derives the result type even if both operands have the same type."""
    alike = type(left) is core.tensor and type(right) is core.tensor and left.dtype is right.dtype
    if alike and not div_or_mod and not left.dtype.is_ptr():
        return self.broadcast_impl_value(left, right)
    return _check(self, left, right, allow_left_pointer, allow_right_pointer, arithmetic, div_or_mod)


def _same_type(self, other) -> bool:
    """Most types that the interpreter compares are identical objects."""
    return self is other or _equal_types(self, other)


def _as_tensor(self, x, check_type=True):
    """Cache the tensors of the numbers in kernels; the interpreter creates one for each use."""
    if type(x) is core.tensor:
        return x
    value = x.value if type(x) is tl.constexpr else x
    if type(value) not in (bool, int, float):
        return _to_tensor(self, x, check_type)
    return interpreter_operators.constant(value, self.to_tensor_type(value))


def _run(self, *arguments, grid, warmup, **named):
    """Run the programs of a launch. The interpreter would inspect the kernel's signature three times, and copy the
    memory of all tensors from and to a GPU."""
    if warmup:
        return
    if self not in _kernels:
        constants = interpreter.GridExecutor(self.fn, self.arg_names, grid).constexprs
        parameters = inspect.signature(self.fn).parameters.values()
        defaults = {one.name: one.default for one in parameters if one.default is not one.empty}
        _kernels[self] = set(self.arg_names), set(constants), defaults
    names, constants, defaults = _kernels[self]
    assert len(arguments) <= len(names), f"{self.fn.__name__} has {len(names)} parameters"
    given = defaults | dict(zip(self.arg_names, arguments))
    given |= {name: value for name, value in named.items() if name in names}
    given = {name: value if name in constants else _as_argument(value) for name, value in given.items()}
    sizes = (*(grid(given) if callable(grid) else grid), 1, 1)[:3]
    kernel, builder = self.rewrite(), interpreter.interpreter_builder
    builder.set_grid_dim(*sizes)
    try:
        for place in product(*map(range, sizes)):
            builder.set_grid_idx(*place)
            kernel(**given)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


def _as_argument(value):
    """Cache numbers and the types of pointers; the interpreter derives a type for each argument of each launch."""
    if type(value) is int and -(2**31) <= value < 2**31:
        return interpreter_operators.constant(value, tl.int32)
    if type(value) is not torch.Tensor:
        return _argument(value)
    if value.dtype not in _pointer_types:
        _pointer_types[value.dtype] = _argument(value).dtype
    return interpreter_operators.tensor(np.array([value.data_ptr()], np.uint64), _pointer_types[value.dtype], False)


def _called(self, *arguments, **named):
    """The interpreter would patch the language for each call of a function."""
    try:
        replacement = _replacements[self]
    except KeyError:
        replacement = _replacements[self] = _replacement(self)
    made = replacement(*arguments, **named) if replacement is not None else None
    if made is not None:
        return made
    try:
        return self.rewrite()(*arguments, **named)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


def _replacement(function):
    """Return what computes the results of a reduction at once, or None where there are other ones. The interpreter
    makes them in nested calls, of a dozen operations each."""
    if function in _REDUCTIONS:
        return _REDUCTIONS[function]
    name = (function.fn.__module__, function.fn.__name__)
    block = _SUMS.get(name)
    return None if block is None else partial(_total_of_halves, block)


def _total_of_halves(block, given):
    values = given.handle.data
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return interpreter_operators.tensor(values[..., 0] if block else values, given.dtype, block)


def _patch_member(of, name, member, builder, scope) -> None:
    """Call built-in members directly; the interpreter inspects their named arguments twice."""
    if member.__code__ is not _BUILTIN:
        return _patch_attr(of, name, member, builder, scope)
    inner = member.__wrapped__

    def call(*arguments, **named):
        named["_semantic"] = interpreter.interpreter_semantic
        return inner(*arguments, **named)

    return scope.set_attr(of, name, call)


def _patch_once() -> None:
    """Patch the language once. The interpreter patches it for every call of every function, which takes a quarter of
    the time; in this process it is only used for interpretation."""
    interpreter._patch_lang(_uses_the_language)
    interpreter._patch_lang = lambda _fn: interpreter._LangPatchScope()


def _uses_the_language() -> tuple:
    """Passed to the interpreter, which patches the language modules that it finds among a function's globals."""
    return tl, core


_BUILTIN = core.builtin(_uses_the_language).__code__
interpreter._patch_attr, interpreter._implicit_cvt = _patch_member, _as_argument
interpreter.InterpretedFunction.__call__, interpreter.InterpretedFunction.run = _called, _run
# It measures every array that it makes against its type.
interpreter.TensorHandle.__post_init__ = lambda self: None
TritonSemantic.to_tensor = _as_tensor
interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot = _patch_index, _dot
interpreter.ReduceOps.generic_reduce, interpreter.ScanOps.generic_scan = _reduce, _scan
interpreter._convert_float, interpreter._get_np_dtype = _convert, _np_dtype
core.block_type.__init__, core.tensor.__init__ = _block_type, _tensor
TritonSemantic.broadcast_impl_value = _to_one_shape
TritonSemantic.binary_op_type_checking_impl = _checked
core.dtype.__eq__ = _same_type
# The interpreter would check sums of integers for overflow, and report it only when debugging.
interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
_patch_once()
interpreter_operators.install()
