"""Types that annotations share. Imports no torch, which messages do without."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict, TypeVar

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Array = TypeVar("Array", np.ndarray, "Tensor")
"""What the host has, and what is where the model is."""


class TensorOptions(TypedDict):
    """What torch is told of a new tensor beside its shape."""

    dtype: torch.dtype
    device: torch.device
