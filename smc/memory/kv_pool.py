"""The memory that pages number: keys and values of every layer, on the model's device."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from smc.model.config import ModelConfig

RESERVED_BYTES = 5 << 30
"""Of a GPU, for activations and recorded rounds."""


def pages_that_fit(page_bytes: int, device: torch.device, law_bytes: int = 0) -> int:
    """Pages of so many bytes that a GPU has memory for, besides what is taken already and what laws of chains are going
    to take."""
    free, _ = torch.cuda.mem_get_info(device)
    return max(0, free - RESERVED_BYTES - law_bytes) // page_bytes


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU memory is taken, and cleared, where something is written. An allocator may have some that it would clear
    as a whole."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    untouched = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(untouched, dtype=dtype).view(shape)


class KVPool:
    """Keys and values [layers][pages + 1, J, D] each; page 0 is the dummy page. J key/value heads of D dimensions."""

    def __init__(self, config: ModelConfig, capacity: int, dtype: torch.dtype, device: torch.device | str) -> None:
        shape = (config.num_layers, capacity + 1, config.num_kv_heads, config.head_dim)
        # Zeros, because a masked position still takes part in a product, and 0 * NaN is NaN.
        self.keys, self.values = (_zeros(shape, dtype, torch.device(device)) for _ in range(2))

    @staticmethod
    def page_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
        """Bytes that one token position takes over all layers."""
        return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
