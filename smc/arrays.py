"""Copies arrays between host and device: the scheduler builds batches in NumPy, the models use torch. Also maps
tuples of arrays, and numbers the entries of ragged rows."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from functools import partial, reduce
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

Arrays = TypeVar("Arrays")
"""A tensor, or tuples of tensors."""
Fields = TypeVar("Fields", bound=tuple)
"""A NamedTuple of tensors."""
ALIGNMENT = 16
"""Bytes at whose multiples fields begin within one piece of memory."""


def to_device(array: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """A tensor with the array's values on `device`; on the CPU it may share memory. A tensor is returned unchanged."""
    if isinstance(array, Tensor):
        return array
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    # A copy from unpinned memory would wait for all work queued on the device.
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: Tensor) -> np.ndarray:
    """A NumPy array with the tensor's values. Waits for the device."""
    return tensor.cpu().numpy()


def is_one_of(values: Any, members: Iterable[int]) -> Any:
    """Return which values of an array or tensor are among the members, bool."""
    return reduce(operator.or_, (values == member for member in members))


def map_tensors(function: Callable[..., Any], values: Any, *others: Any) -> Any:
    """Return the same tuples and NamedTuples with `function` applied to every array or tensor, together with those at
    its place in `others`. Everything else stays."""
    if isinstance(values, tuple):
        each = [map_tensors(function, *one) for one in zip(values, *others, strict=True)]
        return type(values)(*each) if hasattr(values, "_fields") else tuple(each)
    return function(values, *others) if isinstance(values, np.ndarray | Tensor) else values


def where(mask: Tensor, values: Arrays, others: Arrays) -> Arrays:
    """Return tuples of tensors whose entries are those of `values` where the mask is true, else those of `others`."""
    return map_tensors(partial(torch.where, mask), values, others)


class Room:
    """Allocates the tensors that a launch writes, on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def longs(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device=self._device)

    def ints(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=self._device)

    def floats(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self._device)

    def doubles(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float64, device=self._device)

    def bools(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bool, device=self._device)


def field(kind: type[np.generic], shape: tuple[int, ...]) -> Any:
    """Return an array that only has a type and a shape."""
    return np.broadcast_to(np.zeros((), kind), shape)


class PackedFields(NamedTuple, Generic[Fields]):
    """Tensors that lie within one piece of memory, so that one copy or one message takes all."""

    memory: Tensor
    """uint8."""
    fields: Fields

    def write(self, values: Fields) -> PackedFields[Fields]:
        """Write all tensors, of any type. Returns the same fields."""
        map_tensors(Tensor.copy_, self.fields, values)
        return self


class FieldMemory:
    """Where every array of tuples lies within one piece of memory, so that one copy or one message takes all."""

    def __init__(self, like: Any) -> None:
        """`like`: arrays or tensors of the same types and shapes, in tuples and NamedTuples."""
        self._like, self.nbytes = like, 0
        self._spans: list[tuple[int, int, torch.dtype]] = []

        def add(array: np.ndarray | Tensor) -> None:
            dtype = array.dtype if isinstance(array, Tensor) else torch.from_numpy(np.empty(0, array.dtype)).dtype
            self._spans.append((self.nbytes, array.nbytes, dtype))
            self.nbytes += -(-array.nbytes // ALIGNMENT) * ALIGNMENT

        map_tensors(add, like)

    @property
    def layout(self) -> str:
        """Name, type, shape and place of every array. Equal texts mean that the same bytes hold the same values."""
        named = _named(type(self._like).__name__, self._like)
        return "\n".join(
            f"{name} {dtype} {tuple(array.shape)} at {begin}"
            for (name, array), (begin, _, dtype) in zip(named, self._spans, strict=True)
        )

    def views(self, memory: Tensor) -> Any:
        """Return the tuples with a view of `memory`, uint8 [nbytes], in the place of every array."""
        spans = iter(self._spans)

        def view(array: np.ndarray | Tensor) -> Tensor:
            begin, size, dtype = next(spans)
            return memory[begin : begin + size].view(dtype).view(array.shape)

        return map_tensors(view, self._like)

    def allocate(self, device: torch.device) -> PackedFields[Any]:
        """Return new memory, and the tuples over it."""
        memory = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        return PackedFields(memory, self.views(memory))


def _named(name: str, values: Any) -> Iterator[tuple[str, Any]]:
    """Yield every array of tuples with the names that lead to it."""
    if isinstance(values, tuple):
        for key, one in zip(getattr(values, "_fields", range(len(values))), values):
            yield from _named(f"{name}.{key}", one)
    else:
        yield name, values


def contiguous(values: Arrays) -> Arrays:
    """Return the same tuples with every tensor contiguous."""
    return map_tensors(Tensor.contiguous, values)


def offsets(count_R: np.ndarray) -> np.ndarray:
    """Return 0, 1, .. within each of R rows of `count` entries, row after row."""
    return np.arange(count_R.sum()) - np.repeat(np.cumsum(count_R) - count_R, count_R)


def common_length(one_L: np.ndarray, other_L: np.ndarray) -> int:
    """Number of leading tokens that two sequences have in common."""
    size = min(len(one_L), len(other_L))
    different = np.flatnonzero(one_L[:size] != other_L[:size])
    return int(different[0]) if len(different) else size
