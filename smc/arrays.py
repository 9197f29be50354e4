"""Copies arrays between host and device: the scheduler builds batches in NumPy, the models use torch. Also maps
tuples of arrays, and numbers the entries of ragged rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor


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


def map_tensors(function: Callable[..., Any], values: Any, *others: Any) -> Any:
    """Return the same tuples and NamedTuples with `function` applied to every array or tensor, together with those at
    its place in `others`. Everything else stays."""
    if isinstance(values, tuple):
        each = [map_tensors(function, *one) for one in zip(values, *others, strict=True)]
        return type(values)(*each) if hasattr(values, "_fields") else tuple(each)
    return function(values, *others) if isinstance(values, np.ndarray | Tensor) else values


def offsets(count_R: np.ndarray) -> np.ndarray:
    """Return 0, 1, .. within each of R rows of `count` entries, row after row."""
    return np.arange(count_R.sum()) - np.repeat(np.cumsum(count_R) - count_R, count_R)
