"""Memory use of a KV pool on a CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import psutil
import pytest
import torch

from smc.memory.kv_cache import KVPool
from tests.model.tiny import tiny_config


@pytest.fixture
def hole() -> Iterator[None]:
    """Leaves the C allocator with a free area larger than a pool, which is not backed by memory."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    *small, last = (libc.malloc(100_000) for _ in range(8_000))
    for address in small:
        libc.free(address)
    libc.malloc_trim(0)
    yield
    libc.free(last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("hole")
def test_memory_is_taken_where_it_is_written(dtype):
    config, capacity = tiny_config(num_layers=2), 2_000_000
    before = psutil.Process().memory_info().rss
    pool = KVPool(config, capacity, dtype, "cpu")
    for memory in (pool.keys, pool.values):
        assert memory.shape == (2, capacity + 1, config.num_kv_heads, config.head_dim) and memory.dtype is dtype
        memory[:, 7:9] = 1.0
        assert not memory[:, 1:7].any() and not memory[:, 9:20].any() and not memory[:, -1].any()
    size = capacity * KVPool.page_bytes(config, dtype)
    assert psutil.Process().memory_info().rss - before < size / 8 > 10 << 20
