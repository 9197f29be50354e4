"""The KV pool: keys and values of every layer, on the model's device, indexed by page."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from smc.model.config import ModelConfig

RESERVED_BYTES = 5 << 30
"""Memory of a GPU for activations and captured graphs."""


def pages_that_fit(page_bytes: int, device: torch.device, distribution_bytes: int = 0) -> int:
    """Pages of so many bytes that a GPU has memory for, besides what is allocated already and what the token
    distributions of draft chains are going to need."""
    free, _ = torch.cuda.mem_get_info(device)
    return max(0, free - RESERVED_BYTES - distribution_bytes) // page_bytes


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros whose memory, on a CPU, is allocated page by page when it is written; an allocator might clear all of
    it."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    untouched = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(untouched, dtype=dtype).view(shape)


class KVPool:
    """Keys and values [layers][pages + 1, J, D] each; page 0 is the dummy page. J key/value heads of D dimensions."""

    def __init__(self, config: ModelConfig, capacity: int, dtype: torch.dtype, device: torch.device | str) -> None:
        shape = (config.num_layers, capacity + 1, config.num_kv_heads, config.head_dim)
        self.windows = tuple(config.window_of(layer) for layer in range(config.num_layers))
        """Positions that a token sees in each layer, itself included; None: all."""
        # Zeros, because a masked position still takes part in a product, and 0 * NaN is NaN.
        self.keys, self.values = (_zeros(shape, dtype, torch.device(device)) for _ in range(2))

    @staticmethod
    def page_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
        """Bytes that one token position takes over all layers."""
        return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
