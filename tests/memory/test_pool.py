"""Memory use of a KV pool on a CPU, and what a GPU leaves for pools."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import psutil
import pytest
import torch

from smc.api.engine_config import EngineConfig
from smc.memory.kv_cache import RESERVED_BYTES, KVPool, pages_that_fit, reserved_bytes
from smc.types import ModelRole
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


@pytest.mark.parametrize(("slots", "more"), [(64, 0.0), (256, 4.3), (512, 10.46)])
def test_logits_of_many_slots_are_reserved_before_pools(slots, more, monkeypatch):
    """With penalties, which any request may have, both copies of a round's logits take 5.2 GiB with 256 slots."""
    config, vocab = EngineConfig(form="lockstep", block=8, branches=1, max_slots=slots), 151_936
    logits = sum(config.logit_bytes(role, vocab) for role in ModelRole)
    assert reserved_bytes(logits) - RESERVED_BYTES == pytest.approx(more * 2**30, abs=0.1 * 2**30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (40 << 30, 80 << 30))
    assert pages_that_fit(1 << 20, torch.device("cuda:0"), logit_bytes=logits) == (
        ((40 << 30) - reserved_bytes(logits)) >> 20
    )
