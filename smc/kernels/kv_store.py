"""What comes before attention: queries and keys normalised and rotated, keys and values written to their pages.

Axes: T tokens, H query heads, J key/value heads, D head dimension, P pages, S parts of a split product.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from smc.kernels.launch import launch_options, one_variant
from smc.kernels.norm import sum_parts


def store_kv(
    qkv: Tensor,
    q_out: Tensor,
    keys: Tensor,
    values: Tensor,
    rope: Tensor,
    position_T: Tensor,
    page_T: Tensor,
    heads: tuple[int, int],
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    pdl: bool = False,
) -> None:
    """Normalise and rotate queries into `q_out` [T, H, D]; write keys (likewise) and values to their pages, but never
    to page 0.

    qkv [T, (H + 2J) * D], or partial sums of it [S, T, (H + 2J) * D]; keys, values [P + 1, J, D]; rope [positions, D]
    float32 as of `RopeTable`; position_T, page_T int32, where padding has page 0 and any position of the table; heads
    (H, J); q_norm, k_norm [D] or neither. All arithmetic is float32, rounded once."""
    (h, j), d = heads, keys.shape[-1]
    assert qkv.shape[-1] == (h + 2 * j) * d and qkv.is_contiguous() and rope.shape[1] == d and rope.is_contiguous()
    assert keys.is_contiguous() and values.is_contiguous() and q_out.is_contiguous() and keys.shape[1] == j
    assert (q_norm is None) == (k_norm is None)
    block, tokens = min(16, triton.next_power_of_2(h + 2 * j)), qkv.shape[-2]
    _store_kernel[(tokens, triton.cdiv(h + 2 * j, block))](
        qkv, q_out, keys, values, rope, position_T, page_T, q_norm, k_norm, eps, tokens * qkv.shape[-1],
        H=h, J=j, D=d, NORM=q_norm is not None, HEADS=block, SPLITS=len(qkv) if qkv.dim() == 3 else 1, PDL=pdl, num_warps=2,
        **launch_options(pdl),
    )  # fmt: skip


@one_variant("qkv", "q_out", "keys", "values", "rope", "q_norm", "k_norm", "split_stride")
def _store_kernel(
    qkv, q_out, keys, values, rope, position_T, page_T, q_norm, k_norm, eps, split_stride,
    H: tl.constexpr, J: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr, HEADS: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token and HEADS of its H + 2J heads, as two halves of D // 2 dimensions."""
    t = tl.program_id(0)
    n = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, D // 2)[None, :]
    is_q, is_k, is_v = n < H, (n >= H) & (n < H + J), (n >= H + J) & (n < H + 2 * J)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    page, position = tl.load(page_T + t), tl.load(position_T + t)
    at = qkv + t.to(tl.int64) * ((H + 2 * J) * D) + n * D + d
    # Rounded as a product that was never split would be.
    a = sum_parts(at, split_stride, n < H + 2 * J, SPLITS).to(q_out.dtype.element_ty).to(tl.float32)
    b = sum_parts(at + D // 2, split_stride, n < H + 2 * J, SPLITS).to(q_out.dtype.element_ty).to(tl.float32)
    x, y = a, b
    if NORM:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
        x *= scale * tl.where(is_q, tl.load(q_norm + d), tl.load(k_norm + d)).to(tl.float32)
        y *= scale * tl.where(is_q, tl.load(q_norm + D // 2 + d), tl.load(k_norm + D // 2 + d)).to(tl.float32)
    cos = tl.load(rope + position.to(tl.int64) * D + d)
    sin = tl.load(rope + position.to(tl.int64) * D + D // 2 + d)
    x, y = x * cos - y * sin, y * cos + x * sin
    q_at = q_out + t.to(tl.int64) * (H * D) + n * D + d
    tl.store(q_at, x, mask=is_q)
    tl.store(q_at + D // 2, y, mask=is_q)
    # The dummy page stays as it is: padding tokens may hold anything, and a masked position must not read a NaN.
    to = page.to(tl.int64) * J * D + d
    k_at, v_at = keys + to + (n - H) * D, values + to + (n - H - J) * D
    tl.store(k_at, x, mask=is_k & (page != 0))
    tl.store(k_at + D // 2, y, mask=is_k & (page != 0))
    tl.store(v_at, a, mask=is_v & (page != 0))
    tl.store(v_at + D // 2, b, mask=is_v & (page != 0))
