"""Triton kernels: attention of few rows over paged keys and values, a group's shared prefix read once for all its rows.
Knows nothing about models or CUDA graphs, though all may be captured in one.

Attention takes two launches a layer. `_prefix_kernel` splits the prefix of every group into chunks and attends all queries of
the group to each (flash decoding: Dao et al. 2023; the cascade of Ye et al. 2024), leaving a normalised output and a base-2
log-sum-exp per split. `_own_kernel` attends each row's queries to its own positions and merges the splits into that.
Where contexts are short, `_direct_kernel` does it in one launch, row by row: reading the prefix from the L2 cache for every row then
costs less than a second launch and a merge. Shapes are static; all that changes between replays of a graph (sizes, lengths, pages)
is read on the device.

Axes: G groups of M rows (a padded grid), R = G * M rows, Q queries of a row (padded), T = R * Q tokens row after row, J key/value
heads, H query heads, N = H // J, D head dimension, L positions of a table, S splits; X = (row, query, head of N) of
a group and Y = (query, head of N) of a row, for one key/value head; P and O tiles of prefix and own positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOWEST = tl.constexpr(-1e30)  # Finite: a query that sees nothing yet would otherwise meet inf - inf.
PROGRAMS = 132  # One for each multiprocessor of an H100 or H200: with more, merging costs more than the reading gains.


@triton.jit
def _chunk(shared, BLOCK_P: tl.constexpr, SPLITS: tl.constexpr, MIN_TILES: tl.constexpr):
    """Prefix positions of one split. Only the first cdiv(shared, chunk) splits have work, and only they are merged."""
    return tl.maximum(tl.cdiv(tl.cdiv(shared, BLOCK_P), SPLITS), MIN_TILES) * BLOCK_P


@triton.jit
def take_in(q_XD, k_PD, v_PD, visible_XP, m_X, l_X, acc_XD, SCALE: tl.constexpr):
    """One tile more in the online softmax, of which m is the largest base-2 logit, l the sum and acc the weighted values."""
    s_XP = tl.dot(q_XD, tl.trans(k_PD), input_precision="ieee")
    s_XP = tl.where(visible_XP, s_XP, -float("inf"))
    new_X = tl.maximum(m_X, tl.max(s_XP, 1) * SCALE)
    p_XP = tl.exp2(s_XP * SCALE - new_X[:, None])
    fade_X = tl.exp2(m_X - new_X)
    acc_XD = tl.dot(p_XP.to(v_PD.dtype), v_PD, acc_XD * fade_X[:, None], input_precision="ieee")
    return new_X, l_X * fade_X + tl.sum(p_XP, 1), acc_XD


@triton.jit
def _prefix_kernel(
    q, keys, values, table_RL, size_G, shared_G, part, lse, q_stride, table_stride, T, M,
    Q: tl.constexpr, N: tl.constexpr, J: tl.constexpr, D: tl.constexpr,
    SCALE: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_P: tl.constexpr, SPLITS: tl.constexpr, MIN_TILES: tl.constexpr,
    STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK_X queries of a group and key/value head, over one split of the prefix. Tiles of one split run side by side."""
    if OVERLAP:  # Also where there is no work: whoever waits for this kernel waits for the one before it.
        gdc_wait()
        gdc_launch_dependents()
    tile, split = tl.program_id(0), tl.program_id(1)
    g, j = tl.program_id(2) // J, tl.program_id(2) % J
    shared, queries = tl.load(shared_G + g), tl.load(size_G + g) * Q * N
    chunk = _chunk(shared, BLOCK_P, SPLITS, MIN_TILES)
    first = split * chunk
    if (first >= shared) | (tile * BLOCK_X >= queries):
        return
    last = tl.minimum(first + chunk, shared)
    x, d = tile * BLOCK_X + tl.arange(0, BLOCK_X), tl.arange(0, D)
    token, head = g * M * Q + x // N, j * N + x % N
    q_XD = tl.load(q + token[:, None] * q_stride + head[:, None] * D + d, mask=(x < queries)[:, None], other=0.0)
    m_X, l_X = tl.full([BLOCK_X], LOWEST, tl.float32), tl.zeros([BLOCK_X], tl.float32)
    acc_XD = tl.zeros([BLOCK_X, D], tl.float32)
    p = tl.arange(0, BLOCK_P)
    pages = table_RL + (g * M).to(tl.int64) * table_stride + p
    page = tl.load(pages + first, mask=first + p < last, other=0)
    for p0 in tl.range(first, last, BLOCK_P, num_stages=STAGES):
        at_PD = (page.to(tl.int64) * J + j)[:, None] * D + d
        k_PD, v_PD = tl.load(keys + at_PD), tl.load(values + at_PD)
        # A tile ahead: the pipeline would otherwise spend its depth on this load before it may start the two that matter.
        page = tl.load(pages + p0 + BLOCK_P, mask=p0 + BLOCK_P + p < last, other=0)
        m_X, l_X, acc_XD = take_in(q_XD, k_PD, v_PD, (p0 + p < last)[None, :], m_X, l_X, acc_XD, SCALE)
    row_X = (split * T + token) * (J * N) + head
    tl.store(lse + row_X, m_X + tl.log2(l_X), mask=x < queries)
    tl.store(part + row_X[:, None] * D + d, acc_XD / l_X[:, None], mask=(x < queries)[:, None])


@triton.jit
def _own_kernel(
    q, keys, values, table_RL, size_G, shared_G, start_R, count_R, part, lse, out, q_stride, table_stride, T, M,
    Q: tl.constexpr, N: tl.constexpr, J: tl.constexpr, D: tl.constexpr,
    SCALE: tl.constexpr, BLOCK_P: tl.constexpr, SPLITS: tl.constexpr, MIN_TILES: tl.constexpr,
    BLOCK_Y: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_S: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK_Y queries of a row and key/value head, over the row's own positions, merged with the splits of its prefix."""
    j, r = tl.program_id(1), tl.program_id(2)
    g = r // M
    shared, start = tl.load(shared_G + g), tl.load(start_R + r)
    count = tl.where(r % M < tl.load(size_G + g), tl.load(count_R + r), 0)
    y, d = tl.program_id(0) * BLOCK_Y + tl.arange(0, BLOCK_Y), tl.arange(0, D)
    token, head = r * Q + y // N, j * N + y % N
    real_Y = y // N < count
    limit_Y = tl.where(real_Y, start - shared + y // N, -1)
    own = tl.where(count > 0, start - shared + count, 0)
    q_YD = tl.load(q + token[:, None] * q_stride + head[:, None] * D + d, mask=real_Y[:, None], other=0.0)
    m_Y, l_Y = tl.full([BLOCK_Y], LOWEST, tl.float32), tl.zeros([BLOCK_Y], tl.float32)
    acc_YD = tl.zeros([BLOCK_Y, D], tl.float32)
    for o0 in tl.range(0, own, BLOCK_O, num_stages=STAGES):
        o = o0 + tl.arange(0, BLOCK_O)
        page = tl.load(table_RL + r.to(tl.int64) * table_stride + shared + o, mask=o < own, other=0).to(tl.int64)
        at_OD = (page * J + j)[:, None] * D + d
        visible_YO = o[None, :] <= limit_Y[:, None]
        m_Y, l_Y, acc_YD = take_in(q_YD, tl.load(keys + at_OD), tl.load(values + at_OD), visible_YO, m_Y, l_Y, acc_YD, SCALE)
    if OVERLAP:  # Always, also where nothing is merged: whoever waits for this kernel waits for the one before it.
        gdc_wait()
        gdc_launch_dependents()
    splits = tl.where(count > 0, tl.cdiv(shared, _chunk(shared, BLOCK_P, SPLITS, MIN_TILES)), 0)
    row_Y = token * (J * N) + head
    for s0 in tl.range(0, splits, BLOCK_S):
        s = s0 + tl.arange(0, BLOCK_S)
        at_SY = s[:, None] * (T * J * N) + row_Y[None, :]
        live_SY = (s < splits)[:, None] & real_Y[None, :]
        lse_SY = tl.load(lse + at_SY, mask=live_SY, other=-float("inf"))
        part_SYD = tl.load(part + at_SY[:, :, None] * D + d, mask=live_SY[:, :, None], other=0.0).to(tl.float32)
        new_Y = tl.maximum(m_Y, tl.max(lse_SY, 0))
        fade_Y, w_SY = tl.exp2(m_Y - new_Y), tl.exp2(lse_SY - new_Y[None, :])
        acc_YD = acc_YD * fade_Y[:, None] + tl.sum(part_SYD * w_SY[:, :, None], 0)
        m_Y, l_Y = new_Y, l_Y * fade_Y + tl.sum(w_SY, 0)
    out_YD = acc_YD / tl.where(real_Y, l_Y, 1.0)[:, None]
    tl.store(out + row_Y[:, None] * D + d, out_YD, mask=(y < Q * N)[:, None])


@triton.jit
def _direct_kernel(
    q, keys, values, table_RL, size_G, start_R, count_R, out, q_stride, table_stride, M,
    Q: tl.constexpr, N: tl.constexpr, J: tl.constexpr, D: tl.constexpr,
    SCALE: tl.constexpr, BLOCK_Y: tl.constexpr, BLOCK_P: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BLOCK_Y queries of a row and key/value head, over all that the row holds, shared or not."""
    j, r = tl.program_id(1), tl.program_id(2)
    y, d, p = tl.program_id(0) * BLOCK_Y + tl.arange(0, BLOCK_Y), tl.arange(0, D), tl.arange(0, BLOCK_P)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    start = tl.load(start_R + r)
    count = tl.where(r % M < tl.load(size_G + r // M), tl.load(count_R + r), 0)
    end = tl.where(count > 0, start + count, 0)
    token, head = r * Q + y // N, j * N + y % N
    real_Y = y // N < count
    limit_Y = tl.where(real_Y, start + y // N, -1)
    q_YD = tl.load(q + token[:, None] * q_stride + head[:, None] * D + d, mask=real_Y[:, None], other=0.0)
    m_Y, l_Y = tl.full([BLOCK_Y], LOWEST, tl.float32), tl.zeros([BLOCK_Y], tl.float32)
    acc_YD = tl.zeros([BLOCK_Y, D], tl.float32)
    pages = table_RL + r.to(tl.int64) * table_stride + p
    page = tl.load(pages, mask=p < end, other=0)
    for p0 in tl.range(0, end, BLOCK_P, num_stages=STAGES):
        at_PD = (page.to(tl.int64) * J + j)[:, None] * D + d
        k_PD, v_PD = tl.load(keys + at_PD), tl.load(values + at_PD)
        page = tl.load(pages + p0 + BLOCK_P, mask=p0 + BLOCK_P + p < end, other=0)
        m_Y, l_Y, acc_YD = take_in(q_YD, k_PD, v_PD, (p0 + p)[None, :] <= limit_Y[:, None], m_Y, l_Y, acc_YD, SCALE)
    row_Y = token * (J * N) + head
    out_YD = acc_YD / tl.where(real_Y, l_Y, 1.0)[:, None]
    tl.store(out + row_Y[:, None] * D + d, out_YD, mask=(y < Q * N)[:, None])


@dataclass(frozen=True)
class Tuning:
    """Sizes that change speed only. `choose` guesses them; a benchmark may know better."""

    block_x: int
    """Queries of a prefix program: as many as there are, at most 128, so that keys are seldom loaded twice."""
    block_p: int
    """Prefix positions of a tile."""
    splits: int
    """Chunks of the prefix: about one program per multiprocessor, and no more than tiles."""
    min_tiles: int
    """Tiles of a chunk at least: with many queries, merging one more split costs more than reading one more tile."""
    warps: int
    """Warps of a prefix program; 4 form one tensor-core group of 64 queries (Hopper's wgmma; below 64 queries it is mma)."""
    stages: int
    """Depth of the prefix kernel's load pipeline."""
    block_y: int
    """Queries of an own program: small, since it is latency and not reading that costs."""
    block_o: int
    """Own positions of a tile: mostly there is one, read in one go."""
    block_s: int
    """Splits merged at once, by registers: at most 64 a thread."""
    own_warps: int
    """Warps of an own program."""
    own_stages: int
    """Depth of the own kernel's load pipeline; 1 is none."""
    direct_p: int
    """Positions of a tile of the direct kernel."""
    direct_warps: int
    direct_stages: int
    overlap: bool
    """Programmatic dependent launch: either kernel starts before the one before it ends, and waits for that where it needs it."""
    partial: torch.dtype
    """Type of the splits' outputs in the workspace."""

    @staticmethod
    def choose(groups: int, rows: int, queries: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, max_context: int) -> Tuning:
        (h, j), wide = heads, dtype.itemsize == 4
        x, y = rows * queries * h // j, queries * h // j
        block_x = min(32 if wide else 128, max(16, triton.next_power_of_2(x)))
        block_p = 32 if wide else 64
        splits = max(1, PROGRAMS // (triton.cdiv(x, block_x) * groups * j))
        splits = min(splits, triton.cdiv(max_context, block_p))
        block_y = 16 if groups * rows * j * triton.cdiv(y, 16) <= 2 * PROGRAMS else min(32, max(16, triton.next_power_of_2(y)))
        return Tuning(
            block_x=block_x,
            block_p=block_p,
            splits=splits,
            min_tiles=2 if x >= 128 else 1,
            warps=8 if block_x >= 128 else 4,
            stages=1 if wide else 4 if head_dim <= 64 else 3,
            block_y=block_y,
            block_o=32 if wide else 64,
            block_s=min(triton.next_power_of_2(splits), max(1, (8192 if block_y == 16 else 4096) // (block_y * head_dim))),
            own_warps=2 if block_y == 16 else 4,
            own_stages=1,
            direct_p=32 if wide else 64,
            direct_warps=2 if block_y == 16 else 4,
            direct_stages=1 if wide else 4 if head_dim <= 64 else 3,
            overlap=False,
            partial=torch.float32,
        )


def check_heads(heads: tuple[int, int], head_dim: int) -> None:
    """Heads (H, J). Raises ValueError for what the kernels cannot do."""
    if heads[0] % heads[1] or head_dim & (head_dim - 1) or head_dim < 16:
        raise ValueError(f"heads {heads} and dimension {head_dim}: want H a multiple of J, and a power of two from 16")


class SharedPrefixAttention:
    """Causal attention of G * M rows of Q queries each, for one static shape. Holds the splits' workspace, which layers share one
    after another; two passes that may run at once need one each."""

    def __init__(
        self,
        groups: int,
        rows: int,
        queries: int,
        heads: tuple[int, int],
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        max_context: int,
        **tuning: object,
    ) -> None:
        """`rows` of a group, `heads` (H, J); `max_context` bounds the positions of a prefix; `tuning` replaces fields of Tuning."""
        check_heads(heads, head_dim)
        h, j = heads
        self.groups, self.rows, self.queries, self.heads, self.head_dim = groups, rows, queries, heads, head_dim
        self.tuning = tune = replace(Tuning.choose(groups, rows, queries, heads, head_dim, dtype, max_context), **tuning)
        tokens = groups * rows * queries
        self.part_STHD = torch.empty(tune.splits, tokens, h, head_dim, dtype=tune.partial, device=device)
        self.lse_STH = torch.empty(tune.splits, tokens, h, dtype=torch.float32, device=device)
        assert self.part_STHD.numel() < 2**31, "the kernels address the workspace in 32 bits"
        self._constants = {
            "T": tokens, "M": rows, "Q": queries, "N": h // j, "J": j, "D": head_dim, "SCALE": head_dim**-0.5 * 1.4426950408889634,
            "BLOCK_P": tune.block_p, "SPLITS": tune.splits, "MIN_TILES": tune.min_tiles, "OVERLAP": tune.overlap,
        }  # fmt: skip

    def run(
        self,
        q_THD: Tensor,
        keys: Tensor,
        values: Tensor,
        table_RL: Tensor,
        size_G: Tensor,
        shared_G: Tensor,
        start_R: Tensor,
        count_R: Tensor,
        out_THD: Tensor,
        short: bool = False,
    ) -> Tensor:
        """Attend, into `out_THD` [T, H, D] contiguous; zeros for padding. Launches two kernels, or one if contexts are `short`, and
        allocates nothing.

        q_THD rotated, tokens at any stride; keys, values [P + 1, J, D] hold the new tokens already; all indices int32.
        size_G rows of each group; position p of a row is page table_RL[r, p], and all rows of a group agree in the first shared_G
        (the table of its first row is read there). Query i < count_R of a row is at position start_R + i and sees positions
        0 .. start + i; shared <= start wherever count > 0.
        """
        h, d = q_THD.shape[1:]
        assert q_THD.stride()[1:] == (d, 1) and len(q_THD) == self._constants["T"] and (h, keys.shape[1]) == self.heads
        assert keys.is_contiguous() and values.is_contiguous() and out_THD.is_contiguous() and table_RL.stride(1) == 1
        tune, j = self.tuning, self.heads[1]
        if short:
            self._run_short(q_THD, keys, values, table_RL, size_G, start_R, count_R, out_THD)
            return out_THD
        tiles = triton.cdiv(self.rows * self.queries * h // j, tune.block_x)
        launch = {"launch_pdl": True} if tune.overlap else {}
        _prefix_kernel[(tiles, tune.splits, self.groups * j)](
            q_THD, keys, values, table_RL, size_G, shared_G, self.part_STHD, self.lse_STH, q_THD.stride(0), table_RL.stride(0),
            BLOCK_X=tune.block_x, STAGES=tune.stages, num_warps=tune.warps, **launch, **self._constants,
        )  # fmt: skip
        _own_kernel[(triton.cdiv(self.queries * h // j, tune.block_y), j, self.groups * self.rows)](
            q_THD, keys, values, table_RL, size_G, shared_G, start_R, count_R, self.part_STHD, self.lse_STH, out_THD,
            q_THD.stride(0), table_RL.stride(0), BLOCK_Y=tune.block_y, BLOCK_O=tune.block_o, BLOCK_S=tune.block_s,
            STAGES=tune.own_stages, num_warps=tune.own_warps, **launch, **self._constants,
        )  # fmt: skip
        return out_THD

    def _run_short(
        self,
        q_THD: Tensor,
        keys: Tensor,
        values: Tensor,
        table_RL: Tensor,
        size_G: Tensor,
        start_R: Tensor,
        count_R: Tensor,
        out_THD: Tensor,
    ) -> None:
        tune, (h, j) = self.tuning, self.heads
        names = ("M", "Q", "N", "J", "D", "SCALE", "OVERLAP")
        _direct_kernel[(triton.cdiv(self.queries * h // j, tune.block_y), j, self.groups * self.rows)](
            q_THD, keys, values, table_RL, size_G, start_R, count_R, out_THD, q_THD.stride(0), table_RL.stride(0),
            BLOCK_Y=tune.block_y, BLOCK_P=tune.direct_p, STAGES=tune.direct_stages, num_warps=tune.direct_warps,
            **({"launch_pdl": True} if tune.overlap else {}), **{name: self._constants[name] for name in names},
        )  # fmt: skip
