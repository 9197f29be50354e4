"""NumPy arrays to a device and back: the scheduler's side of every batch is NumPy, the model's is torch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """A tensor with the array's values; on the CPU it may share its memory. A tensor is taken to be there already."""
    if isinstance(array, Tensor):
        return array
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    # From pinned memory: a copy from any other waits for all that the device was asked to do before.
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: Tensor) -> np.ndarray:
    return tensor.cpu().numpy()
