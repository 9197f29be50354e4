"""Triton's interpreter, for where there is no GPU. Imported before any kernel is: the setting is read when one is defined."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np
from triton import language as tl
from triton.runtime import interpreter

_patch_lang_tensor, _create_dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot
_generic_reduce = interpreter.ReduceOps.generic_reduce


def _patch_index(tensor, scope) -> None:
    """Triton 3.6's interpreter holds a scalar as an array of one element, which numpy 2.4 no longer takes for a loop's bound."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def _dot(self, a, b, *rest):
    """It also holds bfloat16 as uint16, and multiplies those as integers."""
    a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
    return _create_dot(self, a, b, *rest)


def _reduce(self, given):
    """Its own way takes one entry after another, each through the combining function: here all of one half with all of the other."""
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


interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot = _patch_index, _dot
interpreter.ReduceOps.generic_reduce = _reduce
