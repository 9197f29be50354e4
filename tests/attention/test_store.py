"""The Triton kernel that runs before attention: it normalises and rotates queries and keys, and writes keys
and values.
"""

from __future__ import annotations

import pytest
import torch

from tests.pairwise import few_of_pairs

pytest.importorskip("triton")

from smc.kernels.packed_rows import CacheTensors, HeadNorms, store_kv
from smc.model.decoder import rotate
from tests.attention.packed import DEVICE


@pytest.mark.parametrize(
    ("heads", "dim", "norm", "dtype", "splits"),
    few_of_pairs(
        (*shape, dtype, splits)
        for shape in [((4, 2), 64, False), ((8, 2), 128, True), ((20, 4), 64, True)]
        for dtype in (torch.float32, torch.bfloat16)
        for splits in (1, 2)
    ),
)
def test_store_normalises_rotates_and_writes(dtype, heads, dim, norm, splits):
    generator = torch.Generator().manual_seed(1)
    (h, j), tokens = heads, 5
    qkv = torch.randn(tokens, (h + 2 * j) * dim, generator=generator).to(dtype)
    qkv[-1] = torch.nan  # A padding token's input can be anything.
    rope = torch.randn(30, dim, generator=generator)
    position_T, page_T = (
        torch.tensor([3, 29, 0, 7, 0], dtype=torch.int32),
        torch.tensor([4, 1, 9, 0, 0], dtype=torch.int32),
    )
    keys, values = (torch.randn(11, j, dim, generator=generator).to(dtype) for _ in "kv")
    norms = [torch.randn(dim, generator=generator).to(dtype) for _ in "qk"] if norm else []
    q_out = torch.full((tokens, h, dim), torch.nan, dtype=dtype)
    parts = qkv if splits == 1 else torch.stack((qkv.float() - 1, torch.ones_like(qkv, dtype=torch.float32)))
    on_device = [x.to(DEVICE).clone() for x in (parts, q_out, keys, values, rope, position_T, page_T)]
    head_norms = HeadNorms(*(x.to(DEVICE) for x in norms), 1e-6) if norm else None
    store_kv(*on_device[:2], CacheTensors(*on_device[2:4]), *on_device[4:], heads, head_norms)
    out, new_keys, new_values = (x.cpu() for x in on_device[1:4])

    q_THD, k_TJD, v_TJD = qkv.float().unflatten(1, (-1, dim)).split((h, j, j), 1)
    if norm:
        q_THD, k_TJD = (torch.nn.functional.rms_norm(x, (dim,), w.float(), 1e-6) for x, w in zip((q_THD, k_TJD), norms))
    q_THD, k_TJD = (rotate(x, rope[position_T]) for x in (q_THD, k_TJD))
    keys[page_T[:3]], values[page_T[:3]] = k_TJD[:3].to(dtype), v_TJD[:3].to(dtype)
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 8e-3}
    torch.testing.assert_close(out[:4], q_THD[:4].to(dtype), **tolerance)
    torch.testing.assert_close(new_keys, keys, **tolerance)
    torch.testing.assert_close(new_values, values, **(tolerance if splits > 1 else {"atol": 0, "rtol": 0}))
